"""Experts over ranks: each rank of `ep` has some of a layer's experts, and tokens travel to the experts they visit.

`finding` knows a layer of experts by its structure, `routes` says which rows travel where, `exchange` moves them,
`layer` puts the three around a layer's own forward, `trial` proves on a small model that parts of such a layer sum up
to the whole, and `parallelization` has the verb, `parallelize_experts`.
"""
