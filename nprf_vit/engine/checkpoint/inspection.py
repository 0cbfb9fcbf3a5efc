"""What a file of torch.save would build, found without building it, and within bounds.

`torch.load(weights_only=True)` executes nothing, but it builds whatever a file describes: views of a petabyte, tensors
beyond the end of their storage, lists that hold themselves, what a few kilobytes inflate to. Here the opcodes of the
pickle are followed with stand-ins for tensors, and only a file that describes plain values and dense tensors within
its own bytes is given to torch.
"""

import math
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

MAX_PICKLE = 64 << 20  # bytes; the description of a large model takes less than one of its 64 MiB
MAX_DEPTH = 16
_REPEATED = 4  # tensors may share storages, but not add up to more than so many times the file
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # begins the files of torch before 1.6

_SIZES = {'Float': 4, 'Double': 8, 'Half': 2, 'BFloat16': 2, 'Long': 8, 'Int': 4, 'Short': 2, 'Char': 1, 'Byte': 1}
_STORAGES = {f'torch {name}Storage': size for name, size in {**_SIZES, 'Bool': 1}.items()}
_TENSOR, _PARAMETER = 'torch._utils _rebuild_tensor_v2', 'torch._utils _rebuild_parameter'
_DICT, _SIZE = 'collections OrderedDict', 'torch Size'


class Storage(NamedTuple):
    key: str
    kind: str
    length: int  # numbers

    @property
    def size(self) -> int:
        return self.length * _STORAGES[self.kind]


class TensorPlan(NamedTuple):
    """A tensor that is not there yet."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * _STORAGES[self.storage.kind]


class _Global(NamedTuple):
    name: str


class _Mark:
    pass


Operation = Callable[[list[Any], Any], None]  # of an opcode, on the stack and its argument


def inspect_file(path: Path) -> Any:
    """The content with a TensorPlan for each tensor; ValueError for anything out of the ordinary."""
    total = path.stat().st_size
    with open(path, 'rb') as stream:
        zipped = stream.read(4) == b'PK\x03\x04'
        stream.seek(0)
        content, sizes, length = (_open_zip if zipped else _open_legacy)(stream, total)
    tensors = list(_walk(content, length))
    if sum(tensor.size for tensor in tensors) > _REPEATED * total:
        raise ValueError('its tensors are larger than the file')
    storages: dict[str, Storage] = {}
    for tensor in tensors:
        _check_tensor(tensor)
        storage = tensor.storage
        if storages.setdefault(storage.key, storage) != storage:
            raise ValueError(f'storage {storage.key} has two sizes')
        if sizes is not None and sizes.get(storage.key) != storage.size:
            raise ValueError(f'storage {storage.key} is not of the size that the file says')
    if sum(storage.size for storage in storages.values()) > total:
        raise ValueError('its storages are larger than the file')
    return content


def _open_zip(stream: BinaryIO, total: int) -> tuple[Any, dict[str, int], int]:
    """The content, the size of each storage by key, and the length of the description."""
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        if len({member.filename.lower() for member in members}) != len(members):
            raise ValueError('two members of one name')
        if any(m.compress_type != zipfile.ZIP_STORED or m.file_size != m.compress_size for m in members):
            raise ValueError('compressed members, which torch.save never writes')
        if sum(member.file_size for member in members) > total:
            raise ValueError('its members are larger than the file')
        root = members[0].filename.split('/')[0]
        description = archive.getinfo(f'{root}/data.pkl')
        if description.file_size > MAX_PICKLE:
            raise ValueError(f'a description of {description.file_size} bytes, above {MAX_PICKLE}')
        with archive.open(description) as pickle:
            content = _follow(pickle)
    start = f'{root}/data/'
    sizes = {m.filename.removeprefix(start): m.file_size for m in members if m.filename.startswith(start)}
    return content, sizes, description.file_size


def _open_legacy(stream: BinaryIO, total: int) -> tuple[Any, None, int]:
    """Torch before 1.6: pickles of a magic number, a version, facts about the machine, and the content."""
    if _follow(stream) != _LEGACY_MAGIC:
        raise ValueError('neither of the two formats of torch.save')
    _follow(stream), _follow(stream)
    begin = stream.tell()
    content = _follow(stream)
    return content, None, stream.tell() - begin


def _follow(stream: IO[bytes]) -> Any:
    """Run a pickle on stand-ins. Stops at the first opcode or name that torch.save would not write."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    arg: Any
    for opcode, arg, position in pickletools.genops(stream):
        if (position or 0) > MAX_PICKLE:
            raise ValueError(f'a description of more than {MAX_PICKLE} bytes')
        name = opcode.name
        if name in ('PROTO', 'FRAME'):
            continue
        if name == 'STOP':
            return stack.pop()
        if name in ('BINPUT', 'LONG_BINPUT', 'PUT'):
            memo[int(arg)] = stack[-1]
        elif name == 'MEMOIZE':
            memo[len(memo)] = stack[-1]
        elif name in ('BINGET', 'LONG_BINGET', 'GET'):
            stack.append(memo[int(arg)])
        else:
            _OPCODES.get(name, _refuse_opcode)(stack, arg)
    raise ValueError('it ends too early')


def _refuse_opcode(stack: list[Any], arg: Any) -> None:
    raise ValueError('a description with opcodes that torch.save does not write')


def _push(stack: list[Any], arg: Any) -> None:
    if isinstance(arg, int) and arg.bit_length() > 64 and arg != _LEGACY_MAGIC:
        raise ValueError('an integer of more than 64 bits')
    stack.append(arg)


def _constant(value: Any) -> Operation:
    return lambda stack, arg: stack.append(value)


def _pop_mark(stack: list[Any]) -> list[Any]:
    where = len(stack) - 1
    while not isinstance(stack[where], _Mark):
        where -= 1
        if where < 0:
            raise ValueError('a description without sense')
    items = stack[where + 1 :]
    del stack[where:]
    return items


def _tuple(count: int | None) -> Operation:
    def work(stack: list[Any], arg: Any) -> None:
        items = _pop_mark(stack) if count is None else stack[len(stack) - count :] if count else []
        if count:
            del stack[-count:]
        stack.append(tuple(items))

    return work


def _append(stack: list[Any], items: list[Any]) -> None:
    if type(stack[-1]) is not list:
        raise ValueError('items for something that is no list')
    stack[-1].extend(items)


def _set(stack: list[Any], items: list[Any]) -> None:
    if type(stack[-1]) is not dict or len(items) % 2:
        raise ValueError('items for something that is no dict')
    for key, value in zip(items[::2], items[1::2]):
        if type(key) not in (str, int):
            raise ValueError(f'a key of type {type(key).__name__}')
        stack[-1][key] = value


def _build(stack: list[Any], arg: Any) -> None:
    """The attribute _metadata of a state dict, which is kept as an entry that no state dict can have."""
    state = stack.pop()
    if type(stack[-1]) is not dict or type(state) is not dict or set(state) - {'_metadata'}:
        raise ValueError('attributes for something that has none')
    stack[-1].setdefault(_Attributes, []).append(state)


class _Attributes:
    """Key of the attributes of a dict."""


def _persistent(stack: list[Any], arg: Any) -> None:
    given = stack.pop()
    if not (isinstance(given, tuple) and len(given) in (5, 6) and given[0] == 'storage' and given[5:] in ((), (None,))):
        raise ValueError('a reference to something that is no storage')
    _, kind, key, _, count = given[:5]
    if not (isinstance(kind, _Global) and kind.name in _STORAGES and isinstance(key, str) and _is_count(count)):
        raise ValueError('a storage of a kind that no weights have')
    stack.append(Storage(key, kind.name, count))


def _reduce(stack: list[Any], arg: Any) -> None:
    given, function = stack.pop(), stack.pop()
    name = function.name if isinstance(function, _Global) and isinstance(given, tuple) else None
    if name == _DICT and not given:
        stack.append({})
    elif name in (_SIZE, _PARAMETER) and given and isinstance(given[0], tuple):  # a TensorPlan is one too
        stack.append(given[0])
    elif name == _TENSOR and len(given) in (6, 7) and isinstance(given[0], Storage):
        storage, offset, shape, stride = given[:4]
        if not (_is_count(offset) and _are_counts(shape) and _are_counts(stride) and len(shape) == len(stride)):
            raise ValueError('a tensor of an impossible shape')
        stack.append(TensorPlan(storage, offset, shape, stride))
    else:
        raise ValueError('a tensor or an object of a kind that no checkpoint has')


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48


def _are_counts(value: Any) -> bool:
    return type(value) is tuple and len(value) <= 16 and all(_is_count(item) for item in value)


def _name(stack: list[Any], arg: str) -> None:
    if arg not in (*_STORAGES, _TENSOR, _PARAMETER, _DICT, _SIZE):
        raise ValueError(f'{arg[:60].replace(" ", ".")} is nothing that a checkpoint may hold')
    stack.append(_Global(arg))


_OPCODES: dict[str, Operation] = {
    **{name: _constant(value) for name, value in (('NONE', None), ('NEWTRUE', True), ('NEWFALSE', False))},
    **dict.fromkeys(('BININT', 'BININT1', 'BININT2', 'LONG1', 'BINFLOAT'), _push),
    **dict.fromkeys(('BINUNICODE', 'SHORT_BINUNICODE'), _push),
    'EMPTY_DICT': lambda stack, arg: stack.append({}),
    'EMPTY_LIST': lambda stack, arg: stack.append([]),
    'MARK': lambda stack, arg: stack.append(_Mark()),
    'EMPTY_TUPLE': _tuple(0),
    'TUPLE1': _tuple(1),
    'TUPLE2': _tuple(2),
    'TUPLE3': _tuple(3),
    'TUPLE': _tuple(None),
    'APPEND': lambda stack, arg: _append(stack, [stack.pop()]),
    'APPENDS': lambda stack, arg: _append(stack, _pop_mark(stack)),
    'SETITEM': lambda stack, arg: _set(stack, [stack.pop(), stack.pop()][::-1]),
    'SETITEMS': lambda stack, arg: _set(stack, _pop_mark(stack)),
    'BUILD': _build,
    'BINPERSID': _persistent,
    'REDUCE': _reduce,
    'GLOBAL': _name,
}


def _walk(content: Any, limit: int) -> Iterator[TensorPlan]:
    """All tensors. Every value took a byte of the description: more of them come from lists that hold lists twice."""
    left = [(content, 0)]
    count = 0
    while left:
        value, depth = left.pop()
        count += 1
        if count > limit:
            raise ValueError('values that repeat each other without end')
        if depth > MAX_DEPTH:
            raise ValueError(f'more than {MAX_DEPTH} levels')
        if isinstance(value, TensorPlan):
            yield value
        elif isinstance(value, dict):
            left += [(item, depth + 1) for item in value.values()]
            value.pop(_Attributes, None)
        elif type(value) in (list, tuple):
            left += [(item, depth + 1) for item in value]
        elif value is not None and type(value) not in (bool, int, float, str):
            raise ValueError('a part of a tensor without the rest')


def _check_tensor(tensor: TensorPlan) -> None:
    count = math.prod(tensor.shape)
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride))
    if count and (count > tensor.storage.length or last >= tensor.storage.length):
        raise ValueError(f'a tensor of shape {tensor.shape} in a storage of {tensor.storage.length}')
