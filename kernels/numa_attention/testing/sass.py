"""Instructions of machine code for NVIDIA: which registers each reads and writes, and where it goes from there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile

# a set of registers is an integer, with a bit for each register of a kind
_FIRST_BIT = {"R": 0, "UR": 256, "P": 512, "UP": 520}
EVERY_REGISTER = (1 << 528) - 1

_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@!?(U?P\w+)\s+)?([A-Z][^;]*)")
_REFERENCE = re.compile(r"`\(([^)]+)\)")
_TARGETS = re.compile(r'\(\*"BRANCH_TARGETS ([^"]*)"\*\)')

# in an operand, behind what says how its number is meant
_REGISTER = re.compile(r"(?<![\w.])(U?[RP])(\d+)(?!\w)(\.64)?")
# operands that are a register: RZ, URZ, PT and UPT, which need no writer, among them
_RESULT = re.compile(r"(U?R)(\d+|Z)$")
_PREDICATE = re.compile(r"(U?P)(\d+|T)$")
_PLAIN = re.compile(r"[-~!|]*U?[RP](\d+|Z|T)[\w.|]*$")

# opcodes whose results are predicates: a register behind those is a source
_PREDICATES_ALONE = re.compile(r"U?[IFHD]SETP|U?PLOP3|FCHK")
_VOTE = re.compile(r"VOTEU?\b")
# opcodes that write none of the registers they name, though their first operand may be one
_NO_RESULT = re.compile(r"(BRXU?|BRA|JMXU?|JMP|CALL|RET|EXIT|BAR|WARPSYNC|NANOSLEEP)\b")
_GOES_ELSEWHERE = re.compile(r"(BRXU?|JMXU?|JMP|RET|EXIT)\b|BRA\S* `")

# opcode -> registers that a result takes, and each source in turn, the last number standing for the rest. What is not
# here takes one: rather a read too few than one that is none
_WIDTHS = [
    (r"U?IMAD\.WIDE", 2, (1, 1, 2)),
    (r"HMMA\.16816\.F32", 4, (4, 2, 4)),
    (r"HMMA\.16816\.F16", 2, (4, 2, 2)),
    (r"HMMA\.1688\.F32", 4, (2, 1, 4)),
    (r"[IQ]MMA\.16832", 4, (4, 2, 4)),
    (r"D(ADD|MUL|FMA|MNMX)\b|U?IADD3?\.64", 2, (2,)),
    (r"DSETP", 1, (2,)),
    (r"F2F\.F32\.F64|F2I\.([SU]32\.)?F64", 1, (2,)),
    (r"CS2R(?!\.32)|F(ADD|MUL|FMA)2\b|F2F\.F64\.F32|I2F\.F64|F2I\.[SU]64|\S*\.64\b", 2, (1,)),
]
_MOVE = re.compile(r"U?MOV$|IMAD\.(MOV|U32)")
_WGMMA = re.compile(r"[HQIB]GMMA\.(\d+)x(\d+)x\d+\.(F16\b(?!\.))?")
_MATRICES = re.compile(r"(?:LDSM|STSM)\S*MT?88(?:\.(\d))?|(?:LDTM|STTM)\S*\.x(\d+)")
_TENSOR_COPY = re.compile(r"UTMALDG\.(\d)D")
_MEMORY = re.compile(r"U?(LD[CGSL]?U?|ST[GSL]?|ATOM[GS]?|RED[GS]?|SYNCS)\b")


@dataclass(frozen=True)
class Instruction:
    """One instruction, the registers that it reads and writes, and the labels that it names.

    falls_through: what stands behind it may be next.
    """

    address: int
    text: str
    reads: int
    writes: int
    targets: tuple[str, ...]
    falls_through: bool

    @property
    def opcode(self) -> str:
        return self.text.split()[0].split(".")[0]


def _bits(kind: str, number: str, count: int = 1) -> int:
    return 0 if number in "ZT" else ((1 << count) - 1) << (_FIRST_BIT[kind] + int(number))


def _widths(opcode: str, operands: list[str]) -> tuple[int, tuple[int, ...]]:
    """Registers that a result takes, and each source in turn."""
    if found := _WGMMA.match(opcode):
        sums = int(found[1]) * int(found[2]) // (256 if found[3] else 128)
        return sums, (4, 4, sums) if _PLAIN.match(operands[1]) else (4, sums)
    if found := _MATRICES.match(opcode):
        count = int(found[1] or found[2] or 1)
        return count, (count,)
    if _MEMORY.match(opcode):
        bits = re.search(r"\.(64|128|256)\b", opcode)
        # 256 bits are two operands of 128
        count = min(int(bits[1]) // 32, 4) if bits else 1
        return count, (count,)
    return next(
        ((result, sources) for pattern, result, sources in _WIDTHS if re.match(pattern, opcode)), (1, (1,))
    )


def _results(opcode: str, operands: list[str]) -> int:
    """How many of the first operands are written."""
    if _NO_RESULT.match(opcode):
        return 0
    predicates = len(list(takewhile(_PREDICATE.match, operands)))
    if _PREDICATES_ALONE.match(opcode):
        return min(predicates, 2)
    if _VOTE.match(opcode):
        # a predicate, or a register and a predicate
        return 1 if predicates else 1 + bool(_PREDICATE.match(operands[1]))
    behind = operands[predicates:]
    registers = len(list(takewhile(_RESULT.match, behind[: 2 if ".ENL2." in opcode else 1])))
    carries = len(list(takewhile(_PREDICATE.match, behind[registers:]))) if registers else 0
    return predicates + registers + carries


def _registers(opcode: str, operands: list[str]) -> tuple[int, int]:
    """What an instruction reads and what it writes."""
    if opcode.startswith(("P2R", "R2P")) and operands[-1].startswith("0x"):
        chosen = int(operands[-1], 16) << _FIRST_BIT["P"]
        (kind, number) = re.match(r"(U?R)(\d+|Z)", operands[opcode.startswith("R2P")]).groups()
        return (chosen, _bits(kind, number)) if opcode.startswith("P2R") else (_bits(kind, number), chosen)
    written = _results(opcode, operands)
    width, widths = _widths(opcode, operands)
    reads = writes = 0
    for operand in operands[:written]:
        kind, number = (_RESULT.match(operand) or _PREDICATE.match(operand)).groups()
        writes |= _bits(kind, number, width if "R" in kind else 1)
    for place, operand in enumerate(operands[written:]):
        for kind, number, long in _REGISTER.findall(operand):
            if _PLAIN.match(operand) and "R" in kind:
                count = 2 if "F32x2" in operand else widths[min(place, len(widths) - 1)]
            elif operand.startswith("gdesc[") and _WGMMA.match(opcode):
                # descriptors of both matrices, of which the first is not used where that matrix is in registers
                number, count = (str(int(number) + 2), 2) if place else (number, 4)
            elif copied := _TENSOR_COPY.match(opcode):
                # where to, a barrier and the coordinates; then the address of the tensor's description
                count = 2 if place else 2 + int(copied[1])
            else:
                count = 2 if long or (kind == "UR" and operand.startswith(("gdesc[", "desc["))) else 1
            reads |= _bits(kind, number, count)
    return reads & ~_passed_on(opcode, operands), writes


def _passed_on(opcode: str, operands: list[str]) -> int:
    """The register of which an instruction keeps, moves or spills what may never have been written, computing nothing.

    Such are a byte permutation that sets some bytes, flags of one bit each that are set and cleared, spills, and moves,
    which ptxas also makes of a pair of which one is of use.
    """
    if opcode.startswith("STL"):
        return _named(operands[1], _widths(opcode, operands)[0])
    sources = [operand.removesuffix(".reuse") for operand in operands[1:]]
    if _MOVE.match(opcode) and _RESULT.match(sources[-1]) and all(source == "RZ" for source in sources[:-1]):
        return _named(sources[-1])
    if opcode == "PRMT" and sources[1].startswith("0x"):
        choices = [int(sources[1], 16) >> 4 * place & 0xF for place in range(4)]
        for first, source in ((0, sources[0]), (4, sources[2])):
            chosen = [
                (place, choice - first) for place, choice in enumerate(choices) if choice & 0xC == first
            ]
            if source == operands[0] and all(place == byte for place, byte in chosen):
                return _named(source)
    if opcode == "LOP3.LUT" and sources[0] == operands[0] and sources[1].startswith("0x"):
        constant = int(sources[1], 16)
        flag = {"0xfc": constant, "0xc0": ~constant & 0xFFFFFFFF}.get(sources[3], 0)  # or, and
        if flag.bit_count() == 1 and sources[2] == "RZ":
            return _named(operands[0])
    return 0


def _named(operand: str, count: int = 1) -> int:
    return _bits(*_RESULT.match(operand).groups(), count)


def instruction(line: str) -> Instruction | None:
    """What a line of `nvdisasm -c` says, None where it is no instruction."""
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    address, predicate, text = found.groups()
    named = _TARGETS.search(text)
    text = _TARGETS.sub("", text).strip()
    opcode, _, rest = text.partition(" ")
    operands = [operand.strip() for operand in rest.split(",") if operand.strip()]
    reads, writes = _registers(opcode, operands)
    if predicate:
        kind, number = re.match(r"(U?P)(\d+|T)", predicate).groups()
        reads |= _bits(kind, number)
    targets = tuple(_REFERENCE.findall(text)) + tuple(named[1].split(",") if named else ())
    falls_through = bool(predicate) or not _GOES_ELSEWHERE.match(text)
    return Instruction(int(address, 16), text, reads, writes, targets, falls_through)


def names(registers: int) -> list[str]:
    """The names of a set of registers."""
    numbers = [bit for bit in range(registers.bit_length()) if registers >> bit & 1]
    kinds = [
        max((kind for kind in _FIRST_BIT if _FIRST_BIT[kind] <= bit), key=_FIRST_BIT.get) for bit in numbers
    ]
    return [f"{kind}{bit - _FIRST_BIT[kind]}" for kind, bit in zip(kinds, numbers, strict=True)]
