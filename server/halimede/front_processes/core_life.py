"""Whether the core runs, as a front-end process sees it by the core's beats."""

from halimede.core.hangs import Silence
from halimede.front_processes.page import Page

_NS_PER_SEC = 1_000_000_000


class CoreLife:
    """The core hangs when it has not beaten for the time limit of hangs (`core.hangs`)."""

    def __init__(self, page: Page, limit_secs: float) -> None:
        self._page = page
        self._silence = Silence(int(limit_secs * _NS_PER_SEC))
        self._beats = 0
        self._hangs = False

    def check(self, now_ns: int) -> None:
        """Note whether the core has beaten. Called with each beat of this process."""
        before, self._beats = self._beats, self._page.core_beats
        self._hangs = self._silence.check(now_ns, is_alive=self._beats != before)

    def is_live(self) -> bool:
        """Whether it does not hang."""
        return not self._hangs or self._page.core_beats != self._beats
