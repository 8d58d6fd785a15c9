"""A tab of a browser, whatever drives it: what tests of the page do with one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class PageError(AssertionError):
    """A script in the page failed."""


class Tab(ABC):
    """Remembers every error that the page reported."""

    errors: list[str]

    @abstractmethod
    async def open(self, url: str) -> None:
        """Load a page; its modules have run by then."""

    @abstractmethod
    async def reload(self) -> None: ...

    @abstractmethod
    async def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, when its promise is kept. Raises PageError."""

    @abstractmethod
    async def before_load(self, script: str) -> None:
        """Run a script in every page that this tab opens, before the page's own."""

    @abstractmethod
    async def click(self, selector: str) -> None:
        """A real click in the middle of an element, which must be visible there."""

    @abstractmethod
    async def press(self, key: str) -> None: ...

    @abstractmethod
    async def type(self, text: str) -> None: ...

    @abstractmethod
    async def choose_file(self, selector: str, path: Path) -> None: ...

    async def until(self, expression: str, seconds: float = 30) -> Any:
        """Wait inside the page until an expression is true; says what the page showed when it never is."""
        value = await self.evaluate(
            f"""new Promise((resolve) => {{
              const deadline = performance.now() + {seconds * 1000};
              const look = async () => {{
                const value = await ({expression});
                if (value || performance.now() > deadline) resolve(value || null);
                else setTimeout(look, 50);
              }};
              look();
            }})"""
        )
        if value is None:
            shown = await self.evaluate("document.body.innerText")
            raise PageError(f"never true: {expression}\nerrors: {self.errors}\npage:\n{shown}")
        return value
