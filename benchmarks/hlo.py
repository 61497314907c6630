"""Reads a program as XLA prints it: its kernels, the bytes they move and the FLOPs of their products."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16} | {f"{k}{n}": n for k in "suf" for n in (8, 16, 32, 64)}
# These launch nothing and move no bytes. The end of an asynchronous operation counts with its start.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
WHOLE = {"sort", "dot", "reduce", "reduce-window"}  # need a whole operand for any part of the result
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


@dataclasses.dataclass
class Array:
    type: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return self.size * BITS.get(self.type, 0) // 8


@dataclasses.dataclass
class Instruction:
    name: str
    result: list[Array]  # several arrays for a tuple
    opcode: str
    operands: list[str]
    attributes: str

    def names_in(self, attribute: str) -> list[str]:
        """Returns the computations that an attribute names: `calls=a` or `branch_computations={a, b}`."""
        found = re.search(rf"\b{attribute}=(?:{{([^}}]*)}}|([\w.-]+))", self.attributes)
        return (found[1] or found[2]).split(", ") if found else []

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.result)

    @property
    def sent(self) -> int:
        """Bytes that a collective sends between devices; 0 for any other instruction."""
        if self.opcode.removesuffix("-start") not in COLLECTIVES:
            return 0
        begun = self.opcode.endswith("-start") and len(self.result) > len(self.operands)  # then it holds its operands
        return sum(array.bytes for array in self.result[len(self.operands) if begun else 0 :])


@dataclasses.dataclass
class Kernel:
    name: str
    opcode: str
    times: int  # launches in a call of the program, several in a loop
    bytes: int
    flops: dict[str, int]  # of its products, by operand type
    collective: int  # bytes sent between devices
    cycles: int  # XLA's estimate for a TPU
    line: str  # line of the package that it comes from
    scatters: list[str]  # types that it accumulates by scattering


class Program:
    """An HLO module, parsed from text."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry, instructions, self._tables, table = "", {}, collections.defaultdict(dict), ""
        for line in re.sub(r"/\*.*?\*/|%", "", text).splitlines():  # without comments
            if header := re.match(r"(ENTRY )?([\w.-]+)(?: \(.*)? (?:-> .*)?{$", line):
                instructions = self.computations[header[2]] = {}
                self.entry = header[2] if header[1] else self.entry
            elif re.match(r"\s+(ROOT )?[\w.-]+ = ", line):
                instruction = _instruction(line)
                instructions[instruction.name] = instruction
            elif re.fullmatch(r"FileNames|FunctionNames|FileLocations|StackFrames", line):
                table = line
            elif row := re.match(r"(\d+) (.*)", line):
                self._tables[table][int(row[1])] = row[2]

    def kernels(self) -> list[Kernel]:
        return list(self._kernels(self.entry, 1))

    def loops(self) -> list[list[Kernel]]:
        """Returns the kernels of one iteration of each loop, in the order of the program."""
        loops = (each for each in self.computations[self.entry].values() if each.opcode == "while")
        return [[kernel for body in loop.names_in("body") for kernel in self._kernels(body, 1)] for loop in loops]

    def _kernels(self, computation: str, times: int) -> Iterator[Kernel]:
        instructions = self.computations[computation]
        for each in instructions.values():
            if each.opcode in FREE or each.opcode.endswith(("-done", "-update")):
                continue
            if each.opcode == "while":
                trips = re.search(r'known_trip_count":\s*{"n":"(\d+)"', each.attributes)
                for body in each.names_in("body"):
                    yield from self._kernels(body, times * int(trips[1] if trips else 1))
            elif each.opcode in ("call", "conditional", "async-start"):
                for attribute in ("to_apply", "calls", "branch_computations", "true_computation", "false_computation"):
                    for body in each.names_in(attribute):
                        yield from self._kernels(body, times)
            else:
                inner = [each, *self._inside(each)]
                cycles = re.search(r'"estimated_cycles":"(\d+)"', each.attributes)
                yield Kernel(
                    each.name,
                    each.opcode,
                    times,
                    0 if each.sent else self._bytes(each, instructions),
                    self._flops(each, instructions),
                    each.sent,
                    int(cycles[1]) if cycles else 0,
                    self._line(each) or next(filter(None, map(self._line, inner)), ""),
                    [i.result[0].type for i in inner if i.opcode == "scatter"],
                )

    def _inside(self, fusion: Instruction) -> Iterator[Instruction]:
        for name in fusion.names_in("calls"):
            for each in self.computations[name].values():
                yield each
                yield from self._inside(each)

    def _bytes(self, kernel: Instruction, around: dict[str, Instruction]) -> int:
        """Counts each operand as read once and each result as written once.

        An operand that is only sliced or gathered from counts in part. A library's scratch memory does not count.
        """
        read = [around[name].bytes if name in around else 0 for name in kernel.operands]
        body = self.computations[kernel.names_in("calls")[0]] if kernel.opcode == "fusion" else {}
        written = kernel.result[0].bytes if "__cublas" in kernel.attributes else kernel.bytes
        users = collections.defaultdict(list)
        for each in body.values():
            for place, operand in enumerate(each.operands):
                users[operand].append((each, place))
            if each.opcode in ("dynamic-update-slice", "scatter"):  # in place: reads and writes what it changes
                update = body[each.operands[1 if each.opcode == "dynamic-update-slice" else 2]]
                written -= each.bytes - 2 * update.bytes
        needed = _needed(body, users)
        for each in body.values():
            if each.opcode == "parameter":
                number = int(each.operands[0])
                read[number] = read[number] * needed[each.name] // max(1, each.result[0].size)
        return sum(read) + max(written, 0)

    def _flops(self, kernel: Instruction, around: dict[str, Instruction]) -> dict[str, int]:
        found = collections.Counter()
        if kernel.opcode == "dot" or re.search(r'custom_call_target="__cublas\S*(gemm|matmul)', kernel.attributes):
            a, b = (around[name].result[0] for name in kernel.operands[:2])
            numbers = kernel.attributes
            if kernel.opcode != "dot":
                numbers = re.sub(r'"(\w+)":\["?([\d",]*)\]', lambda m: f"{m[1]}={{{m[2]}}}".replace('"', ""), numbers)
                numbers = numbers.replace("_dimensions=", "_dims=")
            dims = re.search(r"\blhs_contracting_dims={([\d,]*)}", numbers)
            contracted = [int(d) for d in dims[1].split(",") if d] if dims else []
            found[a.type if a.type == b.type else "f32"] += (
                2 * math.prod(kernel.result[0].dims) * math.prod(a.dims[d] for d in contracted)
            )
        for name in kernel.names_in("calls"):
            for each in self.computations[name].values():
                found.update(self._flops(each, self.computations[name]))
        return dict(found)

    def _line(self, instruction: Instruction) -> str:
        frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return self._line_of_frame(int(frame[1])) if frame else ""

    @functools.cache  # noqa: B019  a program lives as long as the process
    def _line_of_frame(self, frame: int) -> str:
        """Returns the innermost line of the package in a stack of frames."""
        while frame:
            fields = dict(re.findall(r"(\w+)=(\d+)", self._tables["StackFrames"][frame]))
            location = dict(re.findall(r"(\w+)=(\d+)", self._tables["FileLocations"][int(fields["file_location_id"])]))
            file = self._tables["FileNames"][int(location["file_name_id"])].strip('"')
            if "/transformer_flax/" in file:
                return f"{file.split('/transformer_flax/')[-1]}:{location['line']}"
            frame = int(fields["parent_frame_id"]) - 1
        return ""


def _needed(body: dict[str, Instruction], users: dict[str, list[tuple[Instruction, int]]]) -> dict[str, int]:
    """Returns how many elements of each array inside a fusion its results need."""
    needed = {}
    for array in reversed(body.values()):  # users follow what they use
        size = sum(each.size for each in array.result)
        found = 0 if users[array.name] else size
        for user, place in users[array.name]:
            if user.opcode in ("dynamic-slice", "slice", "gather") and place == 0:
                found += user.result[0].size
            elif user.opcode in ("dynamic-update-slice", "scatter") and place == 0:
                continue
            else:  # element by element: as many as of the user's result
                like = user.result[0].size == size and user.opcode not in WHOLE
                found += needed[user.name] if like else size
        needed[array.name] = min(size, found)
    return needed


def _instruction(line: str) -> Instruction:
    name, text = line.strip().removeprefix("ROOT ").split(" = ", 1)
    shape, text = _cut(text)
    opcode, text = text.lstrip().split("(", 1)
    operands, attributes = _cut("(" + text)
    names = [operand.split()[-1] for operand in operands[1:-1].split(", ") if operand]
    result = [Array(kind, tuple(int(d) for d in dims.split(",") if d)) for kind, dims in SHAPE.findall(shape)]
    return Instruction(name, result, opcode, names, attributes)


def _cut(text: str) -> tuple[str, str]:
    """Splits a text after the shape or the list in parentheses at its beginning."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "({") - (character in ")}")
        if depth == 0 and (character == ")" or text[i + 1 : i + 2] in (" ", "")):
            return text[: i + 1], text[i + 1 :]
    return text, ""
