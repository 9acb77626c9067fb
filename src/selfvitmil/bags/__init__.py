"""Feature files of slides: `files` writes ours and reads all known kinds, `export` writes those of other tools."""

from __future__ import annotations

from selfvitmil.bags.export import (
    DTYPES,
    TOOLS,
    ExportJob,
    ExportResult,
    export_anndata,
    export_clam,
    export_slide,
    export_stamp,
    export_trident,
    plan_export,
)
from selfvitmil.bags.files import (
    FORMAT_VERSION,
    SCHEMA,
    Bag,
    Features,
    check_bag,
    concat_scales,
    find_bags,
    read_bag,
    write_bag,
)

__all__ = [
    "DTYPES",
    "FORMAT_VERSION",
    "SCHEMA",
    "TOOLS",
    "Bag",
    "ExportJob",
    "ExportResult",
    "Features",
    "check_bag",
    "concat_scales",
    "export_anndata",
    "export_clam",
    "export_slide",
    "export_stamp",
    "export_trident",
    "find_bags",
    "plan_export",
    "read_bag",
    "write_bag",
]
