"""What the tests of the kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.ops.cpu import native


@pytest.fixture
def best_isa_afterwards() -> Iterator[None]:
    """Undoes a test's choice of an instruction set."""
    yield
    if native.load() is not None:
        native.set_isa(None)
