"""What emitted code calls: groups, collectives, kernels, parameters, the state of a step. Knows no compiler."""
