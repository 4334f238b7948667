"""Hypothesis strategies over layouts."""

from hypothesis import strategies as st

from lightning_5d.layout import CP_METHODS, Layout

_sizes = st.integers(1, 64)


@st.composite
def layouts(draw, resolved: bool | None = None) -> Layout:
    """Any valid layout, built from fields and not from text; with ``dp`` set, absent, or (None) either."""
    fields = {"tp": draw(_sizes), "cp": draw(_sizes), "pp": draw(_sizes), "zero": draw(st.integers(0, 3))}
    fields["ac"] = draw(st.one_of(st.just(0), st.just("sel"), _sizes))
    fields["mbs"] = draw(st.none() | _sizes)
    if fields["tp"] > 1:
        fields["sp"] = draw(st.sampled_from((None, True, False)))
    if fields["cp"] > 1:
        fields["cp_method"] = draw(st.sampled_from(CP_METHODS))
    if fields["pp"] > 1:
        choices = [
            ("gpipe", 1),
            ("1f1b", 1),
            ("interleaved", draw(st.integers(2, 8))),
            ("zb", draw(st.integers(1, 8))),
            ("zbv", 2),
            ("dualpipev", 2),
        ]
        fields["schedule"], fields["v"] = draw(st.sampled_from(choices))
    fields["rep"] = draw(_sizes) if fields["zero"] else 1
    fields["ep"] = draw(_sizes)
    has_dp = draw(st.booleans()) if resolved is None else resolved
    if has_dp:
        fields["dp"] = fields["rep"] * fields["ep"] * draw(st.integers(1, 4))
    return Layout(**fields)
