"""The row table: which run of slots a run of queries reads, and at which shift.

A row is eight integers. Within a row slot, raw index and birth rise by one from key to key, and
shift and `visible_until` are constant. Decode, prefill, recovery, spliced KV and a batch of
requests differ in their rows and in nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

Int32s = Int[Array, " rows"] | Int[np.ndarray, " rows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """A table of rows, and the raw index of each packed query. All int32.

    A query sees key i of a row iff it is one of the row's queries and
    `raw + i <= query_raw < visible_until`. A row with no queries or no keys is empty and adds
    nothing: tables are padded with such rows.
    """

    NEVER: ClassVar[int] = np.iinfo(np.int32).max  # visible_until of a key that was never dropped
    NO_QUERY: ClassVar[int] = -1  # query_raw of padding: it sees nothing
    COLUMNS: ClassVar[tuple[str, ...]] = (
        "q_start", "q_len", "slot", "length", "raw", "birth", "shift", "visible_until")

    q_start: Int32s  # [R] first packed query
    q_len: Int32s  # [R] how many queries
    slot: Int32s  # [R] first slot of the run
    length: Int32s  # [R] how many keys
    raw: Int32s  # [R] raw index of the first key
    birth: Int32s  # [R] RoPE position that the first key was written at
    shift: Int32s  # [R] birth - position, the same for every key of the row
    visible_until: Int32s  # [R] raw index of the first query that may not see these keys
    query_raw: Int[Array, " queries"] | Int[np.ndarray, " queries"]  # [Q] raw index of each query

    @classmethod
    def empty(cls) -> Rows:
        """A table of no rows and no queries."""
        nothing = np.zeros(0, np.int32)
        return cls(**{field.name: nothing for field in dataclasses.fields(cls)})

    def pad(self, rows: int, queries: int) -> Rows:
        """The same table with `rows` rows and `queries` queries; on the host.

        Raises:
          ValueError: if the table is larger than that.
        """
        have_rows, have_queries = len(self.q_start), len(self.query_raw)
        if have_rows > rows or have_queries > queries:
            raise ValueError(
                f"a table of {have_rows} rows and {have_queries} queries does not fit into "
                f"rows={rows}, queries={queries}; ask for larger ones")
        columns = {name: np.pad(np.asarray(getattr(self, name), np.int32), (0, rows - have_rows))
                   for name in self.COLUMNS}
        query_raw = np.pad(np.asarray(self.query_raw, np.int32), (0, queries - have_queries),
                           constant_values=self.NO_QUERY)
        return Rows(**columns, query_raw=query_raw)

    def where(self, mask: Array) -> Rows:
        """The rows of a mask; the others are empty."""
        return dataclasses.replace(self, q_len=jnp.where(mask, self.q_len, 0))

    @classmethod
    def concatenate(cls, tables: Sequence[Rows]) -> Rows:
        """One table for several requests: their queries are packed one after another."""
        if not tables:
            return cls.empty()
        starts = np.cumsum([0, *(len(table.query_raw) for table in tables[:-1])])
        moved = [dataclasses.replace(table, q_start=(table.q_start + start).astype(np.int32))
                 for table, start in zip(tables, starts, strict=True)]
        return cls(**{field.name: np.concatenate([getattr(table, field.name) for table in moved])
                      for field in dataclasses.fields(cls)})
