"""ALiBi's published slopes, for front ends that divide the heads among devices."""


def published_slopes(heads: int) -> list[float]:
    """The slope of each head, as src/math/bias.h computes them."""
    n = 1 << (heads.bit_length() - 1)
    powers = [-8 * (i + 1) / n for i in range(n)]
    powers += [-4 * (2 * i + 1) / n for i in range(heads - n)]
    return [2.0**x for x in powers]
