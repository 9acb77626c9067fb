"""The stages of a study, in the order of the data; one file each.

`STAGES` is the only list of them: `run`, `plan` and `status` loop over it. A new stage is a file here and an entry in
this list.
"""

from selfvitmil.stages.base import Stage
from selfvitmil.stages.check import Check
from selfvitmil.stages.compare import Compare
from selfvitmil.stages.embed import Embed
from selfvitmil.stages.evaluate import Evaluate
from selfvitmil.stages.lesions import Lesions
from selfvitmil.stages.localize import Localize
from selfvitmil.stages.pretrain import Pretrain
from selfvitmil.stages.report import Report
from selfvitmil.stages.tile import Tile
from selfvitmil.stages.train import Train

STAGES: tuple[Stage, ...] = (
    Check(),
    Tile(),
    Pretrain(),
    Embed(),
    Train(),
    Compare(),
    Evaluate(),
    Localize(),
    Lesions(),
    Report(),
)
