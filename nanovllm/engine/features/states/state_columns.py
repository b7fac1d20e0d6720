"""StateColumns: which cell of the stores beside the KV cache each row of a step reads and writes."""

import numpy as np

from nanovllm.engine.features.columns import Columns


class StateColumns(Columns):
    """The cells of the sequences' states (`places.Places`), for layers with linear attention."""

    def layout(self, max_rows):
        return {"slots": ((max_rows,), np.int32), "row_order": ((max_rows,), np.int64)}

    def write(self, step, rows, host, num_rows):
        places, num_tokens = [seq.place for seq in step.seqs], len(rows.owners)
        slots = host["slots"][:num_rows]
        slots[:num_tokens] = np.array([place.slot for place in places])[rows.owners]
        slots[num_tokens:] = -1
        for head, place, proposed in zip(rows.heads, places, step.proposed, strict=False):
            slots[head + 1 : head + 1 + len(proposed)] = [-2 - slot for slot in place.lent[: len(proposed)]]
        if step.num_prefilled:  # The row of a prompt's last token is before those of the others.
            order = host["row_order"][:num_rows]
            order[:num_tokens] = np.lexsort((rows.positions, rows.owners))
            order[num_tokens:] = np.arange(num_tokens, num_rows)
            copies = (seq.place.copy_of_step(seq.num_cached_tokens) for seq in step.seqs if seq.is_prefill)
            step.extras["state copies"] = [copy for copy in copies if copy is not None]
        return {name: host[name][:num_rows] for name in ("slots", "row_order")}

    def prefill(self, step, rows):
        places = [seq.place.slots_of_step(seq.num_cached_tokens) for seq in step.seqs]
        return {"slots": np.ascontiguousarray(np.array(places, np.int32).T)}

    def context(self, arrays, num_rows, kind):
        order = arrays["row_order"][:num_rows] if kind.is_mixed else None
        return {"slots": arrays["slots"][:num_rows], "row_order": order}

    def prefill_context(self, arrays):
        return {"slots": arrays["slots"]}
