"""Tests may be coroutine functions."""

from own_loop import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
