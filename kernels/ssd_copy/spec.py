"""Declaration of the copy that makes rows of 16-bit elements contiguous and aligned."""

from ..spec import Budget, Declaration, KernelSpec, Parameter, product

COPY = Declaration(
    name="ssd_copy",
    parameters=(
        # Any dtype of 16 bits.
        Parameter("source", "pointer", element="u8", align=2),
        Parameter("target", "pointer", element="u8", align=16),
        *(Parameter(name, "i32") for name in ("batch", "seqlen", "rows", "columns")),
        *(Parameter(f"source_{name}", "i64") for name in ("batch", "token", "row", "column")),
    ),
    choices=("threads", "tokens"),
    selectors=("threads", "tokens"),
    block=("threads", "1", "1"),
    grid=("batch * ceildiv(seqlen, tokens)", "1", "1"),
    budget=Budget(registers=48, warps="40"),
)

SPECS = (
    KernelSpec(
        COPY, product(threads=[256], tokens=[8]), "sonata_aot.kernels.ssd_copy.device:ssd_copy"
    ),
)
