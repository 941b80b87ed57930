"""Messages that nobody should send: from the descriptors field by field, from good ones by mutation, and raw bytes."""

import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

INTEGERS = (0, 1, -1, 2, 3, 7, 16, 255, 256, 4097, 65535, 65536, 10**6)
INT32_EDGES = (2**31 - 1, -(2**31), 2**31 - 2, 2**30)
INT64_EDGES = (2**63 - 1, -(2**63), 2**53 + 1, 2**40, 2**32, *INT32_EDGES)
FLOATS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 5e-324, 1e300, -1e300, 1e9),
    *(float("nan"), float("inf"), float("-inf"), 299.9, 3e38, 4e38),
)
STRINGS = (
    *("", " ", "\0", "a", "0", "-1", "null", "true", "[]", "{}", "nan", "\n", "\r\n", "\t", "\x1b[2J", "\x7f"),
    *(
        "../../etc/passwd",
        "..",
        ".",
        "/",
        "/etc/passwd",
        "//",
        "a/../../b",
        "C:\\x",
        "~",
        "~root",
        "file:///etc/passwd",
    ),
    *("%s%n%x", "${HOME}", "$(id)", "`id`", "'; DROP TABLE runs; --", "{0.__class__}", "__import__('os').system('id')"),
    *("os:system", "subprocess:run", "builtins:eval", "relaxd.rewards:nope", "a:b:c", ":", "a:", ":b", "json:loads"),
    *("²", "٣", "é", "e\u0301", "\u202e", "\ufeff", "\U0001f4a5", "\uff46\uff55", "\ud7ff", "\u2028", "\x85"),
    *(
        "*",
        "?",
        "[a-z]",
        "|",
        ",",
        ";",
        "=",
        "\\",
        '"',
        "'",
        "localhost:0",
        "127.0.0.1:99999",
        "unix:/tmp/x:1",
        "[::1]:1",
    ),
    *(
        "1e999",
        "0x10",
        "1_000",
        "9" * 400,
        "[" * 3000,
        '{"a":' * 1000,
        '{"name": "grpo"}',
        '{"name": 1e999}',
        "NaN",
        "- 1",
    ),
    *("GPU-0", "GPU-" + "a" * 120, "coordinator", "run-1"),
)
LONG = (100, 1000, 5000, 70_000, 300_000)
"""Lengths of long strings, and how many a huge array has at most."""

Hints = Mapping[str, Sequence[Any]]
"""Plausible values by field name, such as ids that exist."""


class Fuzzer:
    """Makes messages. The same seed makes the same ones.

    `hints` are values that fields of a name may well have; `tame` are the only ones that fields of a name get, where
    an extreme one (an term, say) would close the door to everything after it.
    """

    def __init__(self, seed: int | str, hints: Hints, tame: Hints) -> None:
        self.random = random.Random(seed)
        self._hints = hints
        self._tame = tame

    def request(self, method_input: Descriptor, good: Message | None) -> bytes:
        """The bytes of a request: good, mutated, made up, or no message at all."""
        kind = self.random.random()
        if good is not None and kind < 0.55:
            message: Message = type(good)()
            message.CopyFrom(good)
            if kind >= 0.05:
                for _ in range(self.random.choice((1, 1, 1, 2, 3))):
                    self.mutate(message)
        else:
            message = self.made_up(method_input)
        data = message.SerializeToString()
        if kind < 0.85:
            return data
        damaged = data
        for _ in range(self.random.choice((1, 1, 2, 5))):
            damaged = self.damaged(damaged)
        return damaged if self._is_tame(damaged, message) else data

    def made_up(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """A message whose fields are set, or not, to anything of their types."""
        message: Message = GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if self.random.random() < (0.7 if depth < 3 else 0.1):
                self._set(message, field, depth)
        return message

    def mutate(self, message: Message) -> None:
        """Change one field, or one of a message inside."""
        descriptor = message.DESCRIPTOR
        if not descriptor.fields:
            return
        field: FieldDescriptor = self.random.choice(descriptor.fields)
        if field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field) and self.random.random() < 0.8:
            inside = getattr(message, field.name)
            if not field.is_repeated:
                inside.SetInParent()
                self.mutate(inside)
                return
            if len(inside):
                self.mutate(self.random.choice(inside))
                return
        if self.random.random() < 0.15:
            message.ClearField(field.name)
        else:
            self._set(message, field, 1)

    def damaged(self, data: bytes) -> bytes:
        """Bytes with something wrong: flipped, cut, doubled, lengths that lie, unknown fields."""
        rng = self.random
        damage = rng.randrange(8)
        place = rng.randrange(len(data) + 1)
        if damage == 0 and data:
            flipped = bytearray(data)
            flipped[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        if damage == 1:
            return data[:place]
        if damage == 2:
            return data[:place] + rng.randbytes(rng.randrange(1, 64)) + data[place:]
        if damage == 3:
            return data + data
        if damage == 4:  # a string that says it is longer than it is
            return (
                data + bytes([rng.randrange(1, 16) << 3 | 2]) + _varint(rng.choice((1 << 20, 2**31 - 1, 2**63))) + b"x"
            )
        if damage == 5:  # a field that nobody knows
            return data + _varint(rng.randrange(1000, 2**29) << 3 | 2) + _varint(8) + rng.randbytes(8)
        if damage == 6:  # groups that don't end, wrong wire types
            return data + _varint(rng.randrange(1, 20) << 3 | rng.randrange(3, 8)) + rng.randbytes(4)
        return rng.randbytes(rng.randrange(0, 200))

    def _is_tame(self, damaged: bytes, message: Message) -> bool:
        """Return True if the fields that must be tame still have tame values, or those of the message, after damage."""
        read = type(message)()
        try:
            read.ParseFromString(damaged)
        except DecodeError:
            return True
        allowed = {(name, value) for name, values in self._tame.items() for value in values}
        return set(self._tame_fields(read)) <= allowed | set(self._tame_fields(message))

    def _tame_fields(self, message: Message) -> Iterator[tuple[str, Any]]:
        """Yield names and values of the fields that must be tame, those of messages inside included."""
        for field, value in message.ListFields():
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                for inside in [] if _is_map(field) else value if field.is_repeated else [value]:
                    yield from self._tame_fields(inside)
            elif field.name in self._tame:
                yield from ((field.name, one) for one in (value if field.is_repeated else [value]))

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if _is_map(field):
            self._set_map(getattr(message, field.name), field)
        elif field.is_repeated:
            message.ClearField(field.name)
            items = getattr(message, field.name)
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                for _ in range(self.random.choice((0, 1, 2, 5, 40)) if depth < 3 else 0):
                    items.add().CopyFrom(self.made_up(field.message_type, depth + 1))
            else:
                count = self.random.choice((0, 1, 2, 3, 10, 100, 100, 5000))
                if self.random.random() < 0.02:
                    count = self.random.choice(LONG)
                few = [self._value(field, short=count > 10) for _ in range(min(count, 20))]
                items.extend(self.random.choices(few, k=count) if few else ())
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth < 4:
                getattr(message, field.name).CopyFrom(self.made_up(field.message_type, depth + 1))
        else:
            setattr(message, field.name, self._value(field))

    def _set_map(self, values: Any, field: FieldDescriptor) -> None:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        for _ in range(self.random.choice((0, 1, 3, 50))):
            if value.type != FieldDescriptor.TYPE_MESSAGE:
                values[self._value(key, short=True)] = self._value(value, short=True)

    def _value(self, field: FieldDescriptor, *, short: bool = False) -> Any:
        rng = self.random
        if field.name in self._tame:
            return rng.choice(self._tame[field.name])
        hints = self._hints.get(field.name, ())
        is_text = field.cpp_type == FieldDescriptor.CPPTYPE_STRING  # a reward is a name here and a number there
        if hints and isinstance(hints[0], str) == is_text and rng.random() < 0.4:
            return rng.choice(hints)
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                known = [value.number for value in field.enum_type.values]
                return rng.choice((*known, len(known), -1, 99, *INT32_EDGES))
            case FieldDescriptor.CPPTYPE_INT32:
                return rng.choice((*INTEGERS, *INT32_EDGES, rng.randrange(-100, 1000)))
            case FieldDescriptor.CPPTYPE_INT64:
                return rng.choice((*INTEGERS, *INT64_EDGES, rng.randrange(-100, 1000)))
            case FieldDescriptor.CPPTYPE_UINT32:
                return abs(rng.choice((*INTEGERS, *INT32_EDGES)))
            case FieldDescriptor.CPPTYPE_UINT64:
                return rng.choice((0, 1, 2**64 - 1, 2**63, 2**32))
            case FieldDescriptor.CPPTYPE_DOUBLE:
                return rng.choice((*FLOATS, rng.uniform(-10, 10)))
            case FieldDescriptor.CPPTYPE_FLOAT:
                return struct.unpack("<f", struct.pack("<f", rng.choice((0.0, 1.0, float("nan"), float("inf"), -1.5))))[
                    0
                ]
            case FieldDescriptor.CPPTYPE_STRING:
                text = self._text(short)
                return text.encode(errors="surrogatepass") if field.type == FieldDescriptor.TYPE_BYTES else text
        raise AssertionError(f"{field.full_name} has a type that is not fuzzed yet: {field.cpp_type}")

    def _text(self, short: bool) -> str:
        rng = self.random
        kind = rng.random()
        if kind < 0.7:
            return rng.choice(STRINGS)
        if kind < 0.9 or short:
            return "".join(
                chr(rng.choice((rng.randrange(32, 127), rng.randrange(0, 0xD800)))) for _ in range(rng.randrange(1, 40))
            )
        return rng.choice(STRINGS[1:])[:8] * (rng.choice(LONG) // 8)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])
