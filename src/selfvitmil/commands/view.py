"""The command `view`: a study in a browser, served from here or written to a folder.

The study is only read (but for its key of pseudonyms), so no lock is taken and other commands may run beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.errors import ConfigError
from selfvitmil.stages.base import StageResult
from selfvitmil.study import Study

if TYPE_CHECKING:
    from selfvitmil.cohort import Cohort
    from selfvitmil.pseudonyms import Names
    from selfvitmil.view.study import ViewedStudy


@dataclass(frozen=True)
class ViewResult(StageResult):
    """What `view` did: nothing but notes where it served the study."""

    folder: Path | None = None
    """Where the exported study is."""
    num_slides: int = 0
    size_bytes: int = 0


def view(
    study: Study,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    browser: bool = True,
    require_token: bool = False,
    allowed_hosts: Sequence[str] = (),
    base_path: str = "/",
    tokens: Path | None = None,
    pseudonyms: bool = False,
    say: Callable[[str], None],
) -> ViewResult:
    """Serve the study until interrupted; `say` prints its address."""
    from selfvitmil.view.server import listen, serve

    viewed = viewed_study(study, pseudonyms)
    reached: dict[str, Any] = {"require_token": require_token, "allowed_hosts": allowed_hosts}
    reached |= {"base_path": base_path, "tokens": tokens}
    serve(viewed, listen(host, port, **reached), open_browser=browser, say=say)
    return ViewResult()


def export_view(
    study: Study,
    out: Path,
    *,
    slides: Sequence[str] = (),
    top_mpp: float = 2.0,
    pseudonyms: bool = False,
    say: Callable[[str], None],
) -> ViewResult:
    """Write a folder that opens from disk; `say` prints its size."""
    from selfvitmil.view.export import write_folder

    written = write_folder(viewed_study(study, pseudonyms), out, slides=slides, top_mpp=top_mpp, say=say)
    notes = tuple(f"note: {note}" for note in written.notes)
    return ViewResult(out, written.num_slides, written.size_bytes, failures=written.failures, notes=notes)


def viewed_study(study: Study, pseudonyms: bool) -> ViewedStudy:
    """Return a study, or the output of `predict`, as the viewer takes it."""
    from selfvitmil.cohort import read_cohort
    from selfvitmil.pseudonyms import names_of
    from selfvitmil.view.study import ViewedStudy

    # The output of `predict` is looked at as a study is; its slides are listed among the working files.
    table = next((own.cohort for own in (study.layout, study.layout.work) if own.cohort.is_file()), None)
    if table is None:
        raise ConfigError(
            f"{study.name}: there is no study here, and no predictions",
            "it has no cohort.csv",
            "Name a study, or the --out folder of `predict`; `selfvitmil demo` creates a study",
            code="no-study",
        )

    def read(table: Path = table) -> tuple[Cohort, Names]:
        cohort = read_cohort(table)
        return cohort, names_of(study.root, cohort, pseudonyms=pseudonyms)

    cohort, names = read()
    queue = table == study.layout.work.cohort
    return ViewedStudy(study.root, cohort, study.settings, names, follow=(table, read), queue=queue)
