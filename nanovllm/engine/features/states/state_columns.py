"""StateColumns: which cell of the stores beside the KV cache each row of a step writes."""

import numpy as np

from nanovllm.engine.features.columns import Columns
from nanovllm.engine.features.states.cells import Cell


class StateColumns(Columns):
    """The cells of the sequences' states (`cells.Cells`), for layers with linear attention."""

    def __init__(self, has_proposals: bool):
        """has_proposals: whether steps may have proposed tokens (speculation)."""
        self._names = ["cells", "is_proposed"] if has_proposals else ["cells"]

    def layout(self, max_rows):
        return dict.fromkeys(self._names, ((max_rows,), np.int32)) | {"row_order": ((max_rows,), np.int64)}

    def write(self, step, rows, host, num_rows):
        of_rows, num_tokens = host["cells"][:num_rows], len(rows.owners)
        of_rows[:num_tokens] = np.array([seq.cell.index for seq in step.seqs], np.int32)[rows.owners]
        of_rows[num_tokens:] = -1
        if "is_proposed" in self._names:
            is_proposed = host["is_proposed"][:num_rows]
            is_proposed[:] = 0
            for seq, head, proposed in zip(step.seqs, rows.heads, step.proposed, strict=False):
                of_proposed = slice(head + 1, head + 1 + len(proposed))
                of_rows[of_proposed] = seq.cell.lent[: len(proposed)]
                is_proposed[of_proposed] = 1
        if step.num_prefilled:  # The row of a prompt's last token is before those of the others.
            order = host["row_order"][:num_rows]
            order[:num_tokens] = np.lexsort((rows.positions, rows.owners))
            order[num_tokens:] = np.arange(num_tokens, num_rows)
            copies = (seq.cell.copy_of_step(seq.num_cached_tokens) for seq in step.seqs if seq.is_prefill)
            step.extras["state copies"] = [copy for copy in copies if copy is not None]
        return {name: host[name][:num_rows] for name in (*self._names, "row_order")}

    def prefill(self, step, rows):
        cells = [seq.cell.cells_of_step(seq.num_cached_tokens) for seq in step.seqs]
        return {"cells": np.ascontiguousarray(np.array(cells, np.int32).T)}

    def pretend(self, step):
        for seq in step.seqs:
            seq.cell = Cell(0, lent=[0] * sum(map(len, step.proposed)))

    def context(self, arrays, num_rows, kind):
        order = arrays["row_order"][:num_rows] if kind.is_mixed else None
        return {name: arrays[name][:num_rows] for name in self._names} | {"row_order": order}

    def prefill_context(self, arrays, step):
        return {"cells": arrays["cells"]}
