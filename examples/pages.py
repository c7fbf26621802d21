"""Pages of a key-value cache: who uses them, and which hold the start of which prompt."""

from collections.abc import Iterable


class PagePool:
    """Pages 0 to `size - 1`, each free or with a count of its users."""

    def __init__(self, size: int):
        self.size = size
        self._free = list(reversed(range(size)))
        self._users = [0] * size

    @property
    def free(self) -> int:
        return len(self._free)

    def users(self, page: int) -> int:
        return self._users[page]

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, which have one user each from now on.

        Raises:
          ValueError: fewer are free.
        """
        if count > self.free:
            raise ValueError(f"{count} pages were asked for, and {self.free} of {self.size} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more user of a page that has some."""
        if not self._users[page]:
            raise ValueError(f"page {page} is free: it can't be shared")
        self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One user less of each page. A page without users is free again."""
        for page in pages:
            if not self._users[page]:
                raise ValueError(f"page {page} is free already")
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)


class PrefixCache:
    """Full pages of prompts, by all bytes up to their end. It is itself a user of each.

    Keys and values of a token depend on the tokens before it alone. So prompts that begin alike can share
    pages as far as they agree in whole pages. Nothing is ever written to a full page.
    """

    def __init__(self, pool: PagePool, page_size: int):
        self._pool, self._page_size = pool, page_size
        self._pages: dict[bytes, int] = {}
        self._last_use: dict[bytes, int] = {}
        self._time = 0

    def share(self, prompt: bytes) -> list[int]:
        """Pages with the start of `prompt`, each with one more user. The last byte is in none of them.

        The last byte of a prompt must be computed in any case, because its logits give the next token.
        """
        self._time += 1
        found = []
        for start in self._starts(prompt[:-1]):
            page = self._pages.get(start)
            if page is None:
                break
            self._pool.share(page)
            self._last_use[start] = self._time
            found.append(page)
        return found

    def add(self, prompt: bytes, pages: list[int]) -> None:
        """Keep those of `pages` that `prompt` fills, unless another page has the same."""
        self._time += 1
        for start, page in zip(self._starts(prompt), pages, strict=False):
            if start not in self._pages:
                self._pool.share(page)
                self._pages[start] = page
            self._last_use[start] = self._time

    def evict(self, count: int) -> None:
        """Release pages that no sequence uses until `count` pages of the pool are free.

        Those that were used least recently go first; of one prompt, the last ones. If all of them would not
        be enough, they are kept.
        """
        unused = [start for start, page in self._pages.items() if self._pool.users(page) == 1]
        missing = count - self._pool.free
        if missing > len(unused):
            return
        unused.sort(key=lambda start: (self._last_use[start], -len(start)))
        for start in unused[: max(missing, 0)]:
            self._pool.release([self._pages.pop(start)])
            del self._last_use[start]

    def _starts(self, prompt: bytes) -> Iterable[bytes]:
        """`prompt` up to the end of each of its full pages."""
        for end in range(self._page_size, len(prompt) + 1, self._page_size):
            yield prompt[:end]
