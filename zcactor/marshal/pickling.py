"""Values that are not plain: pickle protocol 5 by cloudpickle, with arrays and references kept out of band.

Arrays are not left to PEP 574: NumPy keeps several dtypes, all strided arrays and all subclasses in-band there. A
reducer swaps each one for the same extension that plain values use. Buffers of other libraries (Arrow) do travel as
PEP 574 buffers, see `Buffers`.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import threading
from enum import Enum
from operator import is_
from types import CodeType, FunctionType, MemberDescriptorType, resolve_bases
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakSet, ref

from zcactor.exception_pickling import module_name, namespace_of
from zcactor.lazy_numpy import np
from zcactor.marshal.arrays import array_address, is_shareable, plain_of
from zcactor.marshal.arrow import reduce_array
from zcactor.marshal.exceptions import Exceptions
from zcactor.marshal.foreign import pack_foreign
from zcactor.marshal.importable import by_value_if_needed
from zcactor.marshal.move import UNUSABLE, Move, is_moved
from zcactor.marshal.on_gpu import may_be_on_gpu
from zcactor.marshal.sharing import CLAIMED, share, share_at
from zcactor.marshal.values import Code, registered
from zcactor.native import hot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from zcactor.objectstore.store import Store

__all__ = ["ArrayPacking", "Buffers", "dumps", "loads", "reduce_slotted"]


class ArrayPacking(Protocol):
    """The packing of arrays, as `Buffers` needs it; see `zcactor.marshal.packing.Packing`."""

    store: Store
    eager_limit: int
    closed: list[Any]

    def pack_array(self, array: Any) -> Any:
        """Encode an array by reference, or within the payload."""

    def reference(self, array: Any, holder: Any) -> Any:
        """Encode an array by reference."""

    def pack_groups(self, groups: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Encode groups of arrays whose memory overlaps."""


class Buffers:
    """The buffers of a value that is pickled, and the references to them, which are encoded when all are known.

    Objects of one message may share memory: the columns of two batches of one table, the same dictionary in each chunk.
    Overlapping buffers can be copied together only when all buffers are known.
    """

    def __init__(self, packing: ArrayPacking) -> None:
        self._packing = packing
        self._arrays: list[tuple[npt.NDArray[np.uint8], Any]] = []
        """The bytes of each, and what holds them where they go by reference."""

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer, as ``buffer_callback``. The result says whether the buffer is to be written into the
        pickle.

        Raises:
            ValueError: it is of an array that takes the result of a group's operation under way.
        """
        raw = buffer.raw()
        # The array itself is passed; of any other exporter, what it exports.
        array = raw.obj if isinstance(raw.obj, np.ndarray) else None
        if array is not None and hot.claimed(array):
            raise ValueError(CLAIMED)
        if raw.nbytes < self._packing.eager_limit:
            return True
        holder = None if array is None else share(self._packing.store, array, self._packing.closed)
        self._arrays.append((np.frombuffer(raw, np.uint8), holder))
        return False

    def packed(self) -> list[bytes]:
        """Encode each buffer that is not in the pickle as an extension, in order.

        Raises:
            OutOfMemory: the store cannot hold the copies.
        """
        extensions: list[Any] = [None] * len(self._arrays)
        groups: list[list[int]] = []
        end = 0
        for low, index in sorted((array_address(array), index) for index, (array, _) in enumerate(self._arrays)):
            array, holder = self._arrays[index]
            holder = holder or share_at(self._packing.store, low, low + array.nbytes)
            if holder is not None:
                extensions[index] = self._packing.reference(array, holder)
                continue
            if not groups or low >= end:
                groups.append([])
            groups[-1].append(index)
            end = max(end, low + array.nbytes)
        arrays = [[self._arrays[index][0] for index in group] for group in groups]
        for group, packed in zip(groups, self._packing.pack_groups(arrays), strict=True):
            for index, extension in zip(group, packed, strict=True):
                extensions[index] = extension
        return [extension.data for extension in extensions]


_TYPE: Any = vars(type)
_base_of, _bases_of = _TYPE["__base__"].__get__, _TYPE["__bases__"].__get__
_item_nbytes = _TYPE["__itemsize__"].__get__
_OFFSETS: Any = {"__dict__": _TYPE["__dictoffset__"].__get__, "__weakref__": _TYPE["__weakrefoffset__"].__get__}


# cloudpickle 3.1.3 makes a class with ``__slots__`` without slots, and sets ``__slots__`` afterwards, as an attribute
# like others. Python's own pickling then gives the objects a state that they cannot take.
def reduce_slotted(cls: type) -> Any:
    """The reduction of a class that names its ``__slots__`` and travels by value, by functions that cloudpickle has at
    each receiver; NotImplemented for all others."""
    namespace = namespace_of(cls)
    if "__slots__" not in namespace or issubclass(cls, Enum):  # cloudpickle makes an enumeration in a way of its own
        return NotImplemented
    from cloudpickle import cloudpickle

    if cloudpickle._should_pickle_by_reference(cls):
        return NotImplemented
    constructor, name, bases, keywords, *rest = cloudpickle._class_getnewargs(cls)
    real, resolved = _bases_of(cls), resolve_bases(bases)
    if len(resolved) != len(real) or not all(map(is_, resolved, real)):  # `typing.NamedTuple` gives a class its slots
        return NotImplemented
    slots = _own_slots(cls)
    if slots is not None:
        keywords["__slots__"] = slots
    state, fields = _class_state()(cls)
    declared = namespace["__slots__"]
    if issubclass(type(declared), str | tuple | list | dict):  # an iterator is empty by now
        state["__slots__"] = declared
    arguments = (constructor, name, bases, keywords, *rest)
    return cloudpickle._make_skeleton_class, arguments, (state, fields), None, None, cloudpickle._class_setstate


def _members(cls: type) -> list[str]:
    """The names of a class's own slots, as the attributes are called. A second name of a slot does not count."""
    return [
        name
        for name, each in namespace_of(cls).items()
        if type(each) is MemberDescriptorType and each.__objclass__ is cls and each.__name__ == name
    ]


def _own_slots(cls: type) -> tuple[str, ...] | None:
    """The ``__slots__`` that give a class the layout of `cls`; None where only a class without any has that layout, as
    one that cloudpickle made."""
    given = [
        name for name, offset in _OFFSETS.items() if offset(cls) and not any(offset(base) for base in _bases_of(cls))
    ]
    slots = (*_members(cls), *given)
    return None if slots and _item_nbytes(_base_of(cls)) else slots


@functools.cache
def _class_state() -> Callable[[type], tuple[dict[str, Any], dict[str, Any]]]:
    """cloudpickle's function for the state of a class, without slots. The original takes the names as they are
    written, and fails where a private name is written alone."""
    from cloudpickle import cloudpickle

    extract = cloudpickle._extract_class_dict

    def without_slots(cls: type) -> dict[str, Any]:
        left_out = {"__slots__", "__slotnames__", *_members(cls)}  # `copyreg` finds the second anew
        return {name: each for name, each in extract(cls).items() if name not in left_out}

    original = cloudpickle._class_getstate
    return FunctionType(original.__code__, {**vars(cloudpickle), "_extract_class_dict": without_slots})


class Pickling(ArrayPacking, Protocol):
    """The message that a pickle is part of, on its way out; see `zcactor.marshal.packing.Packing`."""

    authenticate: int

    def mark(self) -> Any:
        """The state of the message, for `go_back`."""

    def go_back(self, mark: Any) -> None:
        """Take back all that was added to the message since `mark`."""

    def pack_moved(self, move: Any) -> Any:
        """Encode an array that is handed over."""

    def allocate(self, count: int, dtype: Any) -> Any:
        """Allocate memory that a reduction writes anew."""


class Unpickling(Protocol):
    """The message that a pickle is part of, on its way in; see `zcactor.marshal.unpacking.Unpacking`."""

    foreign: BaseException | None

    def unpack(self, code: int, data: memoryview) -> Any:
        """Decode the value of one extension."""

    def writable_view(self, array: Any) -> Any:
        """Return a view of an array for a library without read-only arrays."""


_active = threading.local()
_complete: WeakSet[Any] = WeakSet()
"""Classes that travel by value and have all their attributes: sent by this process, or received and filled in."""
_classes: dict[bytes, ref[type]] = {}
"""Received classes of `_complete`, by the streams that they came in."""
CLASSES: Final = 64
"""Number of streams that are kept; `CLASS_NBYTES` bounds the bytes of each."""
CLASS_NBYTES: Final = 64 << 10
_PLAIN_METHODS = ("__reduce__", "__reduce_ex__", "__setstate__", "__getstate__")


def _unpack(code: int, data: bytes) -> Any:
    """Decode an extension found in a pickle. Runs inside `loads`."""
    return _active.unpacking.unpack(code, memoryview(data))


def _fill_class(cls: type, state: Any) -> type:
    """Give a class that came by value its attributes, once.

    cloudpickle recognises a class that it sent or made before, but overwrites its attributes each time. In the process
    that defined the class the methods would then work on copies of their module's globals.
    """
    if cls not in _complete:
        from cloudpickle import cloudpickle

        cloudpickle._class_setstate(cls, state)
        _complete.add(cls)
    return cls


def _subclass(array: Any, cls: type[Any], attributes: dict[str, Any] | None) -> Any:
    value = array.view(cls)
    if attributes:
        value.__dict__.update(attributes)
    return value


def _masked(data: Any, mask: Any, fill_value: Any, hard: bool, cls: type[Any]) -> Any:
    array = cls(data, mask=mask, copy=False, hard_mask=hard)
    array.set_fill_value(fill_value)
    return array


def _torch_tensor(array: Any, dtype: str | None, requires_grad: bool) -> Any:
    import torch

    # Torch has no read-only tensors, and a write to a peer's mapping would kill the process: where this process may not
    # write to the memory, the tensor is made from a copy-on-write view of it, see `Unpacking.writable_view`.
    tensor = torch.from_numpy(_active.unpacking.writable_view(array))
    if dtype is not None:
        tensor = tensor.view(getattr(torch, dtype))
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _jax_array(array: Any) -> Any:
    import jax

    return jax.device_put(array, may_alias=True)


def _reduce_torch(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return NotImplemented
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return NotImplemented
    plain, name = tensor.detach(), None
    if tensor.dtype is torch.bfloat16:
        plain, name = plain.view(torch.int16), "bfloat16"
    elif str(tensor.dtype).startswith("torch.float8"):
        plain, name = plain.view(torch.uint8), str(tensor.dtype).removeprefix("torch.")
    try:
        array = plain.numpy()
    except TypeError:  # a dtype that NumPy lacks
        return NotImplemented
    return _torch_tensor, (array, name, tensor.requires_grad)


def _reduce_foreign(packing: Pickling, value: Any, module: str) -> Any:
    """Reduce an array of another library that would be pickled in band, or with memory beyond its own elements.
    NotImplemented for all other types."""
    if may_be_on_gpu(type(value)) and (packed := pack_foreign(packing, value)) is not None:
        return _unpack, (packed.code, bytes(packed.data))
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and issubclass(type(value), arrow.Array):  # chunks, columns and frames consist of arrays
        return reduce_array(value, packing.allocate)
    if module == "torch" and "torch" in sys.modules:
        return _reduce_torch(value)
    if module.startswith("jaxlib") and type(value).__name__ == "ArrayImpl":
        if not value.is_fully_addressable or any(device.platform != "cpu" for device in value.devices()):
            return NotImplemented
        array = np.asarray(value)
        return NotImplemented if not is_shareable(array.dtype) else (_jax_array, (array,))
    return NotImplemented


class _Encoded:
    """An array among the arguments of a reduction, as its extension."""

    __slots__ = ("ext",)

    def __init__(self, packing: Pickling, array: Any) -> None:
        self.ext = packing.pack_array(array)


def _reduce_subclass(packing: Pickling, value: Any, cls: type[Any]) -> Any:
    """Reduce an instance of a subclass of ndarray by way of the plain array; NotImplemented where the subclass defines
    how it is pickled. The memory decides whether it goes by reference, as for plain arrays. A mapped file is copied
    each time, and stays writable for the caller.
    """
    if not is_shareable(plain_of(value).dtype):
        return NotImplemented
    if isinstance(value, np.ma.MaskedArray):
        if cls is not np.ma.MaskedArray:
            return NotImplemented
        mask = vars(value)["_mask"]
        if mask is not np.ma.nomask:
            mask = _Encoded(packing, mask)
        return _masked, (_Encoded(packing, value), mask, value.fill_value, value.hardmask, cls)
    if any(getattr(cls, name, None) is not getattr(np.ndarray, name, None) for name in _PLAIN_METHODS):
        return NotImplemented
    attributes = dict(value.__dict__) if hasattr(value, "__dict__") and cls is not np.memmap else None
    return _subclass, (_Encoded(packing, value), cls, attributes)


_CACHE: Final = type(functools.lru_cache(lambda: None))
_WRAPPERS: Final = frozenset({_CACHE, functools.cached_property, functools.singledispatchmethod})
_DISPATCH: Final = vars(type(lambda: 0))["__code__"].__get__(functools.singledispatch(lambda _: None))
"""The code of all functions that `functools.singledispatch` makes."""


def _reduce_wrapper(value: Any, cls: type) -> Any:
    """Reduce what functools has made of a function that travels by value; NotImplemented where it travels by name."""
    from cloudpickle import cloudpickle

    if cls is functools.cached_property:
        return _cached_property, (value.func,), (value.attrname, vars(value).get("__doc__")), None, None, _named
    if cls is functools.singledispatchmethod:  # of Python 3.13 it has a cache with weak references
        others = [(key, each) for key, each in value.dispatcher.registry.items() if each is not value.func]
        return cls, (value.func,), others, None, None, _register
    by_value_if_needed(value)
    found = cloudpickle._lookup_module_and_qualname(value)
    if found is not None and not cloudpickle._is_registered_pickle_by_value(found[0]):
        return value.__qualname__ if cls is _CACHE else NotImplemented
    if cls is _CACHE:
        parameters = value.cache_parameters()
        return _cached, (value.__wrapped__, parameters["maxsize"], parameters["typed"])
    registry = dict(value.registry)
    return functools.singledispatch, (registry.pop(object),), list(registry.items()), None, None, _register


def _cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _cached_property(function: Any) -> Any:
    return functools.cached_property(function)


def _named(prop: Any, state: Any) -> None:
    prop.attrname, prop.__doc__ = state


def _register(dispatcher: Any, registry: Any) -> None:
    for cls, function in registry:
        dispatcher.register(cls, function)


_NO_FILE: Final = "<dynamic-code>"
"""The name that cloudpickle 3.1.3 gives to the file of all code that it sends by value."""


@functools.cache
def pickler_class() -> type[Any]:
    """Make the pickler's class. cloudpickle is imported on first use: most messages never need it."""
    import cloudpickle

    class_setstate = cloudpickle.cloudpickle._class_setstate
    code_reduce = cloudpickle.Pickler.dispatch_table[CodeType]

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        packing: Pickling
        exceptions: Exceptions

        def reducer_override(self, value: Any) -> Any:
            cls = type(value)
            if issubclass(cls, BaseException):  # first, as other questions run code of its class
                return self.exceptions.reduce(value)
            if cls is np.ndarray:
                if is_shareable(value.dtype):
                    ext = self.packing.pack_array(value)
                    return _unpack, (ext.code, bytes(ext.data))
                if is_moved(value):
                    raise ValueError(UNUSABLE)
                return NotImplemented
            if cls in _WRAPPERS or (cls is FunctionType and value.__code__ is _DISPATCH):
                return _reduce_wrapper(value, cls)
            if cls is FunctionType or issubclass(cls, type):
                if value not in _complete:
                    by_value_if_needed(value)
                reduced = reduce_slotted(value) if cls is not FunctionType else NotImplemented
                if reduced is NotImplemented:
                    reduced = super().reducer_override(value)
                if type(reduced) is tuple and reduced[-1] is class_setstate:
                    _complete.add(value)
                    reduced = (*reduced[:-1], _fill_class)
                return reduced
            if cls is CodeType:
                make, arguments = code_reduce(value)
                # Tracebacks and warnings name the file that the code is in. Bytes among these are not compared to text.
                unnamed = [type(each) is str and each == _NO_FILE for each in arguments]
                filled = zip(unnamed, arguments, strict=True)
                return make, tuple(value.co_filename if missing else each for missing, each in filled)
            if cls is _Encoded:
                return _unpack, (value.ext.code, bytes(value.ext.data))
            if cls is Move:
                ext = self.packing.pack_moved(value)
                return _unpack, (ext.code, bytes(ext.data))
            entry = registered.get(cls)
            if entry is not None:
                return _unpack, (entry[0], entry[1](self.packing, value))
            if issubclass(cls, np.ndarray):
                return _reduce_subclass(self.packing, value, cls)
            if cls is io.TextIOWrapper and value is not sys.stdout and value is not sys.stderr:
                raise TypeError(f"cannot pickle {cls.__name__!r} object")  # cloudpickle would send its contents
            return _reduce_foreign(self.packing, value, module_name(cls))  # cloudpickle overrides no more than above

    return Pickler


def dumps(packing: Pickling, value: Any) -> tuple[bytes, list[bytes]]:
    """Pickle `value`. Returns the stream, and one encoded extension per out-of-band buffer.

    Exceptions within it keep their types at any depth: where something in one cannot be pickled, all of it but that is.

    Raises:
        Exception: the error of the value's own reduction (TypeError, pickle.PicklingError and others).
    """
    mark = packing.mark()
    exceptions = Exceptions(None)
    try:
        return _dumps(packing, value, exceptions)
    except (Exception, SystemExit):  # of the value's own code: it is raised again, here or by the second attempt
        if not exceptions.found:
            raise
    packing.go_back(mark)

    def attempt(part: Any) -> BaseException | None:
        before = packing.mark()
        try:
            _dumps(packing, part, thorough)
        except (Exception, SystemExit) as error:
            return error
        finally:
            packing.go_back(before)
        return None

    thorough = Exceptions(attempt)
    return _dumps(packing, value, thorough)


def _dumps(packing: Pickling, value: Any, exceptions: Exceptions) -> tuple[bytes, list[bytes]]:
    buffers = Buffers(packing)
    file = io.BytesIO()
    pickler = pickler_class()(file, protocol=5, buffer_callback=buffers.keep)
    pickler.packing = packing
    pickler.exceptions = exceptions
    outer, packing.authenticate = packing.authenticate, 1
    try:
        pickler.dump(value)
        return file.getvalue(), buffers.packed()
    finally:
        packing.authenticate = outer


def loads(unpacking: Unpickling, stream: Any, buffers: list[bytes]) -> Any:
    """Unpickle the result of `dumps`. The peer has been authenticated: unpickling runs its code.

    A class that came by value is remembered by its stream, and the same stream gives it at once from then on. Making it
    again would be in vain, because the existing class takes its place (see `_fill_class`).
    """
    known = _classes.get(stream) if len(stream) <= CLASS_NBYTES else None
    found = known() if known is not None else None
    if found is not None:
        return found
    value = _loads(unpacking, stream, buffers)
    if issubclass(type(value), type) and value in _complete and len(stream) <= CLASS_NBYTES:
        if len(_classes) >= CLASSES:
            _classes.clear()
        _classes[stream] = ref(value)
    return value


def _loads(unpacking: Unpickling, stream: Any, buffers: list[bytes]) -> Any:
    previous = getattr(_active, "unpacking", None)
    _active.unpacking = unpacking
    try:
        return pickle.loads(stream, buffers=[unpacking.unpack(Code.ARRAY, memoryview(b)) for b in buffers])
    except BaseException as error:
        unpacking.foreign = error
        raise
    finally:
        _active.unpacking = previous
