"""Sequences over ranks: rows cut, and attention whose queries and keys lie on several of them.

`cutting` says which tokens a rank has, `batches` cuts a batch so, `pieces` attends with the queries of one rank to keys
of all, `rules` bring keys or heads to where they are needed, `trial` shows that attention alone looks along a row,
and `parallelization` puts a rule into a model.
"""
