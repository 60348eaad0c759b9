"""The tape graph: its vocabulary, the rules that every such graph keeps, and its views (text, networkx).

A tape graph is an ``fx.Graph`` whose calls are *opaque*: ``ops.MulBackward0(grads, *saved)`` is the engine's own
function for that node, with everything it saved given as an argument. Nothing of one step is baked in: tensors, sizes,
scalars and Python objects are placeholders, handed in at each run. What remains as a constant is the structure.
"""

from ..errors import IllegalGraphError
from ..user_code.aot import AOTBackward
from ..user_code.functions import Packed, call_backward
from ..user_code.hooks import cpp_hook, post_accumulate_hook, post_hook, pre_hook, tensor_hook, unpack_hook
from ..user_code.inlined import Inlined, InlinedBackward, Marked
from ..user_code.reducers import reducer_hooks
from ..user_code.traceable import TracedBackward
from ..user_code.traced_hooks import TracedHook
from .legality import RULES, is_validation, rule_of, value_kind, verify
from .operations import (
    PLACEHOLDERS,
    PLAIN_TENSORS,
    USERS_CODE,
    NaNFoundError,
    OpaqueOp,
    accumulate_grad,
    check_nan,
    copy_slices_epilogue,
    copy_slices_prologue,
    hook_kind,
    is_plain,
    runs_users_code,
    sum_gradients,
    zeros,
)
from .structure_keys import (
    Lifted,
    LiftedTensor,
    Listed,
    SavedValue,
    StructureKey,
    argument_of,
    decode_keys,
    encode_keys,
)
from .tape_graph import PART_OF_SUM, Named, TapeCall, TapeGraph, target_name, terms
