"""Plans of who computes which rows, made behind the gate from the rows that there are: exact balance, calibration."""
