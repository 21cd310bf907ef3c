"""CPU twins of the reference operations in float32: C++ compiled at first use, vectors of the machine at hand.

Every output's terms are added in an order that no other row of the batch can change, so results are equal bit for bit
whatever the batch, the chunks or the number of threads. Where no compiler is found the reference runs, and says so.
"""
