"""Lets a failing assertion in the shared suite show its values, as one in a test module does."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.conformance.connection")
