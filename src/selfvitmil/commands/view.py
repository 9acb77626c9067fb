"""The command `view`: a study in a browser, served from here or written to a folder.

The study is only read (but for its key of pseudonyms), so no lock is taken and other commands may run beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from selfvitmil.cohort import read_cohort
from selfvitmil.errors import ConfigError
from selfvitmil.settings import StudySettings
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study.folder import Summary

if TYPE_CHECKING:
    from selfvitmil.view.study import ViewedStudy


def view(
    study: Path,
    settings: StudySettings,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    browser: bool = True,
    require_token: bool = False,
    pseudonyms: bool = False,
) -> Summary:
    """Serve the study until interrupted."""
    from selfvitmil.view.server import listen, serve

    viewed = _viewed(study, settings, pseudonyms)
    serve(viewed, listen(host, port, require_token=require_token), open_browser=browser, say=_say)
    return Summary(("the viewer has ended",))


def export_view(
    study: Path,
    settings: StudySettings,
    out: Path,
    *,
    slides: Sequence[str] = (),
    top_mpp: float = 2.0,
    pseudonyms: bool = False,
) -> Summary:
    """Write a folder that opens from disk."""
    from selfvitmil.view.export import write_folder

    viewed = _viewed(study, settings, pseudonyms)
    made = write_folder(viewed, out, slides=slides, top_mpp=top_mpp, say=_say)
    lines = [f"note: {note}" for note in made.notes]
    lines.append(f"{out.name}: {made.num_slides} slides, {made.size_bytes / 1e6:.1f} MB; open its index.html")
    return Summary(tuple(lines), made.failures)


def _viewed(study: Path, settings: StudySettings, pseudonyms: bool) -> ViewedStudy:
    from selfvitmil.pseudonyms import names_of
    from selfvitmil.view.study import ViewedStudy

    if not StudyLayout(study).cohort.is_file():
        raise ConfigError(
            f"{study.name}: there is no study here", "it has no cohort.csv", "Name a study; `selfvitmil demo` makes one"
        )
    cohort = read_cohort(StudyLayout(study).cohort)
    return ViewedStudy(study, cohort, settings, names_of(study, cohort, pseudonyms=pseudonyms))


def _say(line: str) -> None:
    """At once: what comes next takes its time."""
    print(line, flush=True)
