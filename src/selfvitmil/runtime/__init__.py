"""What every training or inference loop shares: device and precision, processes, optimizers, checkpoints and metrics.

Import from the modules; this package loads nothing by itself, so that code without torch stays light.
"""

import os

# Large CPU tensors on huge pages; torch reads this at its first allocation. The gradient of a 3840 x 3840 weight is
# allocated in every step of DSMIL, and faulting in its small pages took half of the step (47 against 28 ms).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
