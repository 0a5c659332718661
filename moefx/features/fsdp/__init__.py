"""Parameters outside of the experts of which every rank has some rows, gathered before they are used (FSDP, ZeRO-3)."""
