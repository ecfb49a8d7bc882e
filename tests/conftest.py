"""What the whole suite shares: how hypothesis searches.

`make test` plays the same examples each time, so that what passed here passes there. `make search` draws new ones; what it finds becomes a
test of its own, or an `@example`.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("suite", derandomize=True, print_blob=True)
settings.register_profile("search", print_blob=True)
settings.load_profile("suite")
