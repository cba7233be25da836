"""Reads of registers that nothing has written, in machine code for NVIDIA."""

from __future__ import annotations

import re
import subprocess

import pytest
import triton

from numa_attention.testing.sass import instruction, names
from numa_attention.testing.unwritten import unwritten_reads

# two pairs of e4m3 numbers packed into one word, and each pair read back: the second conversion of a pair may read what
# nothing has written
PACKED_AND_READ_BACK = """
.version 8.4
.target sm_90a
.address_size 64
.visible .entry split(.param .u64 out, .param .u64 in)
{
.reg .b64 %rd<2>;
.reg .b32 %r<7>;
.reg .b16 %h<2>;
ld.param.u64 %rd0, [out];
ld.param.u64 %rd1, [in];
ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%rd1];
cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r0;
cvt.rn.satfinite.e4m3x2.f32 %h1, %r3, %r2;
cvt.rn.f16x2.e4m3x2 %r4, %h0;
cvt.rn.f16x2.e4m3x2 %r5, %h1;
mov.b32 %r6, {%h0, %h1};
st.global.b32 [%rd0], %r6;
st.global.v2.b32 [%rd0+8], {%r4, %r5};
ret;
}
"""


@pytest.mark.parametrize("name", ["ptxas", "ptxas_blackwell"])
def test_conversion_that_ptxas_compiles_wrong(name, tmp_path):
    tool = getattr(triton.knobs.nvidia, name)
    source, binary = tmp_path / "split.ptx", tmp_path / "split.cubin"
    source.write_text(PACKED_AND_READ_BACK)
    subprocess.run([tool.path, "--gpu-name", "sm_90a", source, "-o", binary], check=True)
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", binary]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    packed = re.findall(r"PACK_AB_MERGE_C (R\d+)", listing)
    read_back = re.findall(r"UNPACK_B R\d+, (R\d+)", listing)
    assert len(packed) == len(read_back) == 2
    wrong = sorted(set(read_back) - set(packed))
    found = unwritten_reads(listing)
    assert [text.partition(" ")[0] for text in found] == ["F2FP.F16.E4M3.UNPACK_B"] * len(wrong)
    assert all(text.endswith(f"reads {register}") for text, register in zip(found, wrong, strict=True))
    if not wrong:
        pytest.skip(f"ptxas {tool.version} compiles this right")


def listing(*lines: str) -> str:
    """A kernel whose instructions are 16 bytes apart; a line that ends in a colon is a label."""
    head = ['\t.other kernel,@"STO_CUDA_ENTRY STV_DEFAULT"', "kernel:"]
    return "\n".join(
        head
        + [
            line if line.endswith(":") else f"\t/*{16 * place:04x}*/ {line} ;"
            for place, line in enumerate(lines)
        ]
    )


def registers(*lines: str) -> list[str]:
    """The registers that a kernel reads although nothing has written them."""
    return [
        name for text in unwritten_reads(listing(*lines)) for name in text.partition(" reads ")[2].split(", ")
    ]


def test_where_nothing_writes():
    assert unwritten_reads(listing("MOV R1, RZ", "FADD R2, R1, R0", "EXIT")) == [
        "FADD R2, R1, R0 at 0x10 reads R0"
    ]
    # a register that is its own source, a predicate before an instruction, an address
    assert registers("VIADD R3, R3, 0x1", "@!P2 EXIT", "LDG.E R4, desc[UR4][R6.64+0x8]", "EXIT") == (
        ["R3", "P2", "R6", "R7", "UR4", "UR5"]
    )


def test_a_write_on_any_path_is_enough():
    branch = [
        "ISETP.GE.AND P0, PT, RZ, 0x1, PT",
        "@P0 BRA `(.L_x_1)",
        "MOV R2, 0x1",
        ".L_x_1:",
        "FADD R3, R2, R2",
        "EXIT",
    ]
    assert registers(*branch) == []
    assert registers(*(line for line in branch if line != "MOV R2, 0x1")) == ["R2"]
    # under a predicate
    assert registers(branch[0], "@P0 MOV R2, 0x1", "FADD R3, R2, R2", "EXIT") == []
    # behind an unconditional branch, where nothing leads
    assert registers("BRA `(.L_x_1)", "MOV R2, 0x1", ".L_x_1:", "FADD R3, R2, R2", "EXIT") == ["R2"]
    assert registers("EXIT", "FADD R3, R2, R2") == []


def test_what_a_loop_has_written():
    loop = ["ISETP.GE.AND P0, PT, RZ, 0x1, PT", ".L_x_1:", "FADD R3, R2, R2", "FADD R2, R3, R3"]
    again = ["@P0 BRA `(.L_x_1)", "EXIT"]
    # of an earlier turn, for another use
    assert registers(*loop, *again) == ["R2"]
    assert registers("MOV R2, 0x1", *loop, *again) == []
    # in the same turn, in a block that stands behind what it leads back to: no loop of its own
    aside = ["@P0 BRA `(.L_x_3)", "MOV R4, 0x1", ".L_x_2:", "FADD R5, R4, R4", "EXIT"]
    aside += [".L_x_3:", "MOV R4, 0x2", "BRA `(.L_x_2)"]
    assert registers(loop[0], *aside) == []
    assert registers(loop[0], *(line for line in aside if not line.startswith("MOV"))) == ["R4"]
    # behind a loop, what was written inside
    assert registers(loop[0], ".L_x_1:", "FADD R2, RZ, 1", again[0], "FADD R3, R2, R2", "EXIT") == []


def test_ways_that_no_label_tells():
    partitions = ["LDC.64 R2, c[0x2][0x0]", 'BRX R2 -0x30 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)']
    partitions += [".L_x_1:", "MOV R4, 0x1", "EXIT", ".L_x_2:", "FADD R5, R4, R4", "EXIT"]
    assert registers(*partitions) == ["R4"]
    # without the list, a branch may reach any label
    anywhere = [
        partitions[0],
        "BRX R2 -0x30",
        ".L_x_2:",
        "FADD R5, R4, R4",
        "EXIT",
        ".L_x_1:",
        "MOV R4, 0x1",
        "BRA `(.L_x_2)",
    ]
    assert registers(*anywhere) == []
    # a call's results are there behind it, and what it takes comes from where it was called
    call = ["MOV R4, 0x1", "CALL.REL.NOINC `($helper)", "FADD R6, R5, R5", "EXIT", "$helper:", "MOV R5, R4"]
    call += ["RET.REL.NODEC R2 `(kernel)"]
    assert registers(*call) == ["R2"]
    assert registers("CALL.ABS.NOINC R2", "FADD R6, R5, R5", "EXIT") == ["R2"]
    meeting = ["BSSY B0, `(.L_x_1)", "BRA `(.L_x_2)", ".L_x_1:", "FADD R3, R2, R2", "EXIT"]
    assert registers(*meeting, ".L_x_2:", "MOV R2, 0x1", "BSYNC B0") == []
    assert registers(*meeting, ".L_x_2:", "NOP", "BSYNC B0") == ["R2"]


@pytest.mark.parametrize(
    ("text", "reads", "writes"),
    [
        ("LDG.E.128 R8, desc[UR4][R2.64]", "R2-3 UR4-5", "R8-11"),
        ("STG.E.64 desc[UR6][R48.64], R60", "R48-49 R60-61 UR6-7", ""),
        ("LDS.64 R132, [R227+UR8+-0xe0]", "R227 UR8", "R132-133"),
        ("LDSM.16.MT88.4 R152, [R22+0x8100]", "R22", "R152-155"),
        ("STSM.16.M88.2 [R96+0x18c00], R6", "R6-7 R96", ""),
        ("IMAD.WIDE.U32 R4, R6, 0x10, R2", "R2-3 R6", "R4-5"),
        ("IADD3 R10, P0, R11, 0x1, RZ", "R11", "R10 P0"),
        ("UIADD3.X UR11, URZ, UR13, URZ, UP0, !UPT", "UR13 UP0", "UR11"),
        ("ISETP.NE.U32.AND.EX P0, PT, R8, R9, PT, P1", "R8-9 P1", "P0"),
        ("SHFL.BFLY PT, R21, R20, 0x2, 0x1f", "R20", "R21"),
        ("ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR4][R2.64], R6", "R2-3 R6 UR4-5", "R5"),
        ("VOTEU.ANY UP1, P6", "P6", "UP1"),
        ("VOTE.ANY R4, PT, P6", "P6", "R4"),
        ("ELECT P3, URZ, PT", "", "P3"),
        ("CS2R R44, SRZ", "", "R44-45"),
        ("P2R R7, PR, RZ, 0x5", "P0 P2", "R7"),
        ("R2P PR, R7, 0x5", "R7", "P0 P2"),
        ("FADD2 R52, R52.F32x2.HI_LO, R57.F32", "R52-53 R57", "R52-53"),
        ("HMMA.16816.F32.BF16 R92, R76.reuse, R88, RZ", "R76-79 R88-89", "R92-95"),
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR32], RZ, !UPT", "UR32-35", "R24-87"),
        ("HGMMA.64x64x16.F32 R88, R24, gdesc[UR48].tnspB, R88, gsb0", "R24-27 R88-119 UR50-51", "R88-119"),
        ("QGMMA.64x8x32.F32.E4M3.E4M3 R48, gdesc[UR32], R48", "R48-51 UR32-35", "R48-51"),
        ("UTMALDG.3D [UR16], [UR22]", "UR16-20 UR22-23", ""),
        ("UTCHMMA tmem[UR28], gdesc[UR4], tmem[UR16], tmem[UR36], idesc[UR37], UPT", "UR4-5 UR16 UR28 UR36-37", ""),
        ("LDTM.16dp32bit_t0_t15.x32 R4, tmem[UR9+0x100000]", "UR9", "R4-35"),
        ("LDG.E.ENL2.256 R12, R4, desc[UR4][R2.64]", "R2-3 UR4-5", "R4-7 R12-15"),
        # what keeps a part of a register, or spills it, computes nothing with it
        ("PRMT R15, R28, 0x7632, R15", "R28", "R15"),
        ("PRMT R15, R28, 0x5410, R15", "R15 R28", "R15"),
        ("LOP3.LUT R10, R10, 0xfffffff7, RZ, 0xc0, !PT", "", "R10"),
        ("LOP3.LUT R10, R10, 0xfffffff0, RZ, 0xc0, !PT", "R10", "R10"),
        ("STL.64 [R1+0x8], R12", "R1", ""),
        ("UMOV UR9, UR51", "", "UR9"),
        ("IMAD.MOV.U32 R2, RZ, RZ, R4", "", "R2"),
        ("IMAD.MOV.U32 R2, RZ, RZ, -R4", "R4", "R2"),
    ],
)  # fmt: skip
def test_what_an_instruction_reads_and_writes(text, reads, writes):
    def expand(ranges: str) -> set[str]:
        found = set()
        for part in ranges.split():
            kind, first, last = re.fullmatch(r"([A-Z]+)(\d+)(?:-(\d+))?", part).groups()
            found |= {f"{kind}{number}" for number in range(int(first), int(last or first) + 1)}
        return found

    each = instruction(f"        /*0000*/                   {text} ;")
    assert set(names(each.reads)) == expand(reads)
    assert set(names(each.writes)) == expand(writes)


def test_a_listing_without_a_kernel_is_refused():
    with pytest.raises(ValueError, match="names no kernel"):
        unwritten_reads("\t/*0000*/ FADD R2, R1, R0 ;")
