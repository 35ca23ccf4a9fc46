"""Numbers by which graphs of torch name objects that are no tensors."""

from __future__ import annotations

import secrets
import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class Numbered(Generic[T]):
    """Objects by number, each as long as it exists.

    Numbers are random, so that a graph that outlives its object, or comes from another process,
    finds no object. An address would find whatever was made there since.

    Examples
    --------
    >>> class Layer: pass
    >>> layers, one = Numbered[Layer](), Layer()
    >>> number = layers.number_of(one)
    >>> layers.find(number) is one, layers.number_of(one) == number
    (True, True)
    >>> del one
    >>> layers.find(number) is None
    True
    """

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()
        self._numbers: weakref.WeakKeyDictionary[T, int] = weakref.WeakKeyDictionary()

    def number_of(self, one: T) -> int:
        """Return the number of an object, which is an int64."""
        number = self._numbers.setdefault(one, secrets.randbits(62))
        self._objects[number] = one
        return number

    def find(self, number: int) -> T | None:
        """Return the object of a number, None if it no longer exists."""
        return self._objects.get(number)
