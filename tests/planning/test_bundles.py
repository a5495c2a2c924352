"""Dumps of TPU kernels: bodies of tiles in the text of the bundles, and the slots that they fill."""

import pytest

from attnlab.planning import bundles

KERNEL = """= control target key start
LB: loop body
PF: predicated region fallthrough
= control target key end

     0   :  { %s1 = smov 4 /* a constant; of a DMA
base_bounds: (1, 64, 1)
element_size: 2 */ } /* Start region 1 */
   0x1   :  { %s2 = smov 8 } /* End region 1 */
   0x2 LB: > { %s3 = sphi %s1  ;;  %v9 = vcmp.eq.s32.totalorder %v8, %v7 }
   0x3   : > { %3 = sbr.rel (%p1) target = $region4 }
   0x4   : > {}
   0x5   : > { %v1 = vmatmul.bf16.gmra.mxu0 %v0  ;;  %v2 = vmatmul.bf16.gmra.mxu1 %v0 } /* Start region 3 */
   0x6   : > { %v3 = vpop.f32.mrf.mxu0  ;;  %v4 = vmax.f32 %v3, %v2 } /* End region 3 */
   0x7 PF: > { %p2 = scmp.eq.s32.totalorder %s3, 1 } /* Start/End empty region 4 :: Start region 5 */
   0x8   : > { %8 = sbr.rel (%p2) target = $region7 } /* End region 5 */
   0x9   : > { %v5 = vmatmul.msk.bf16.vlgmr.msra.gmra.mxu0 %v0  ;;  %50 = vmatmul.bf16.gmra.mxu1 %v0 }
   0xa   : > { %vm1 = vcmp.ge.s32.totalorder %v1, %v2  ;;  %v6 = vsel %vm1, %v5, %v0 }
   0xb   : >> { %v7 = vadd.f32 %v6, %v5 } /* End region 6 */
   0xc PF:  {} /* Start/End empty region 7 */
"""
UTILIZATION = """== CAPACTIY:
MXU, VALU, VLOAD, VLOAD:FILL
    4     4     3     3
== UTILIZATION:
""" + "\n".join(f"{row % 5} {row} 0 1" for row in range(13))


def test_bodies_are_the_regions_with_matrix_products():
    kernel = bundles.parse(KERNEL, UTILIZATION, "k.1")
    assert (kernel.name, kernel.bundles) == ("k.1", 13)
    assert kernel.capacity == {"MXU": 4, "VALU": 4, "VLOAD": 3, "VLOAD:FILL": 3}
    slots = [{"MXU": 1, "VALU": 11, "VLOAD": 0, "VLOAD:FILL": 2}, {"MXU": 5, "VALU": 30, "VLOAD": 0, "VLOAD:FILL": 3}]
    assert kernel.bodies == [
        bundles.Body(start=5, bundles=2, slots=slots[0], matmuls=2, compares=0, loops=1),
        bundles.Body(start=9, bundles=3, slots=slots[1], matmuls=2, compares=1, loops=2),
    ]


@pytest.mark.parametrize(
    "text, utilization, message",
    [
        (KERNEL.replace("   0x6   :", "   0x7   :"), UTILIZATION, "bundle 0x7: .*0x6"),
        (KERNEL, UTILIZATION + "\n0 0 0 0", "k.1 has 13 .*14"),
        (KERNEL, UTILIZATION + "\n0 0 0", "utilization '0 0 0': "),
        (KERNEL, UTILIZATION + "\n0 0 0 -1", "utilization '0 0 0 -1': "),
        (KERNEL, "", "utilization '': "),
        (KERNEL, "MXU, VALU", "utilization '': "),
        ("", UTILIZATION, "k.1 has 0 .*13"),
    ],
    ids=["gap", "long", "short row", "not a number", "empty", "no capacity", "no bundles"],
)
def test_other_texts_are_errors(text, utilization, message):
    with pytest.raises(ValueError, match=message):
        bundles.parse(text, utilization, "k.1")


def test_folder_gives_final_bundles_of_every_kernel(tmp_path):
    for stamp, name in (("17", "splash_mha_fwd.1"), ("18", "a-b.2")):
        (tmp_path / f"{stamp}-{name}-72-final_bundles.txt").write_text(KERNEL)
        (tmp_path / f"{stamp}-{name}-70-final_hlo-static-per-bundle-utilization.txt").write_text(UTILIZATION)
        (tmp_path / f"{stamp}-{name}-68-pre-delay_hlo-static-per-bundle-utilization.txt").write_text("other")
        (tmp_path / f"{stamp}-{name}-71-schedule-analysis_final_bundles.txt").write_text("other")
    kernels = bundles.read(tmp_path)
    assert [kernel.name for kernel in kernels] == ["a-b.2", "splash_mha_fwd.1"]
    assert all(len(kernel.bodies) == 2 for kernel in kernels)


def test_folder_without_utilization_is_an_error(tmp_path):
    (tmp_path / "17-k.1-72-final_bundles.txt").write_text(KERNEL)
    with pytest.raises(ValueError, match="k.1-72-final_bundles.txt has 0 "):
        bundles.read(tmp_path)
