"""StateColumns: which cell of the stores beside the KV cache each row of a step reads and writes."""

import numpy as np

from nanovllm.engine.features.columns import Columns


class StateColumns(Columns):
    """The cells of the sequences' states (`cells.Cells`), for layers with linear attention."""

    def layout(self, max_rows):
        return {"cells": ((max_rows,), np.int32), "row_order": ((max_rows,), np.int64)}

    def write(self, step, rows, host, num_rows):
        of_rows, num_tokens = host["cells"][:num_rows], len(rows.owners)
        of_rows[:num_tokens] = np.array([seq.cell.index for seq in step.seqs], np.int32)[rows.owners]
        of_rows[num_tokens:] = -1
        for seq, head, proposed in zip(step.seqs, rows.heads, step.proposed, strict=False):
            first = head + 1
            of_rows[first : first + len(proposed)] = [-2 - index for index in seq.cell.lent[: len(proposed)]]
        if step.num_prefilled:  # The row of a prompt's last token is before those of the others.
            order = host["row_order"][:num_rows]
            order[:num_tokens] = np.lexsort((rows.positions, rows.owners))
            order[num_tokens:] = np.arange(num_tokens, num_rows)
            copies = (seq.cell.copy_of_step(seq.num_cached_tokens) for seq in step.seqs if seq.is_prefill)
            step.extras["state copies"] = [copy for copy in copies if copy is not None]
        return {name: host[name][:num_rows] for name in ("cells", "row_order")}

    def prefill(self, step, rows):
        cells = [seq.cell.cells_of_step(seq.num_cached_tokens) for seq in step.seqs]
        return {"cells": np.ascontiguousarray(np.array(cells, np.int32).T)}

    def context(self, arrays, num_rows, kind):
        order = arrays["row_order"][:num_rows] if kind.is_mixed else None
        return {"cells": arrays["cells"][:num_rows], "row_order": order}

    def prefill_context(self, arrays):
        return {"cells": arrays["cells"]}
