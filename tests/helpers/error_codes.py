"""Check error codes in `pytest.raises(SlideError, check=has_code("no-mpp"))`."""

from __future__ import annotations

from collections.abc import Callable

from selfvitmil.errors import SelfVitMilError


def has_code(code: str) -> Callable[[BaseException], bool]:
    def check(error: BaseException) -> bool:
        return isinstance(error, SelfVitMilError) and error.code == code

    return check
