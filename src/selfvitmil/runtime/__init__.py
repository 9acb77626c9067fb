"""What every training or inference loop shares: device and precision, processes, optimizers, checkpoints and metrics.

Import from the modules; this package loads nothing by itself, so that code without torch stays light.
"""
