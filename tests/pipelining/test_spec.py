"""The specification (p; m)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.pipelining.spec import Staleness


@st.composite
def legal(draw: st.DrawFn) -> Staleness:
    num_blocks = draw(st.integers(1, 5))
    queues = st.lists(st.integers(0, 3), min_size=num_blocks - 1, max_size=num_blocks - 1)
    p, q = ((*draw(queues), 0) for _ in range(2))
    return Staleness.dsp(num_blocks, p, q, draw(st.sampled_from(["current", "stashed"])))


@given(legal())
def test_what_is_printed_is_read_again(spec: Staleness) -> None:
    assert Staleness.parse(str(spec)) == spec


@given(legal())
def test_the_identity_of_m_p_and_q_holds(spec: Staleness) -> None:
    for k in range(spec.K - 1):
        assert spec.m[k] == spec.m[k + 1] + spec.p[k] + spec.q[k]
    assert (spec.m[-1], spec.p[-1], spec.q[-1]) == (0, 0, 0)


def test_the_figure_of_the_paper() -> None:
    paper = Staleness.parse("DSP(1,1,0; 4,2,0)")
    assert paper == Staleness.dsp(3, 1, 1) == Staleness.of(3, p=1)
    assert (paper.K, paper.q) == (3, (1, 1, 0))
    assert str(paper) == "DSP(1,1,0; 4,2,0)"


def test_presets_and_defaults() -> None:
    assert str(Staleness.of(4)) == str(Staleness.features_replay(4)) == "DSP(0,0,0,0; 3,2,1,0)"
    assert str(Staleness.backprop(2)) == "DSP(0,0; 0,0)"
    assert str(Staleness.delayed_gradients(3)) == "DSP(0,0,0; 2,1,0; stashed)"
    assert str(Staleness.of(1)) == "DSP(0; 0)"
    assert Staleness.of(3, m=(4, 1, 0)).p == (1, 1, 0)
    assert Staleness.of(3, m=(0, 0, 0)) == Staleness.backprop(3)
    assert Staleness.of(3, m=2).m == (2, 2, 0)
    assert Staleness.of(3, m=Staleness.delayed_gradients(3)).backward_params == "stashed"
    assert Staleness.of(3, m=Staleness.delayed_gradients(3), backward_params="current").backward_params == "current"


@pytest.mark.parametrize(
    ("p", "m", "names"),
    [
        ((1, 1, 0), (2, 2, 0), ["m_0=2", "m_1=2", "p_0=1"]),
        ((0, 0, 0), (1, 2, 0), ["m_0=1", "m_1=2"]),
        ((0, 0, 0), (2, 1, 1), ["m_2=1", "p_2=0"]),
        ((0, 0, 1), (2, 1, 0), ["m_2=0", "p_2=1"]),
        ((0, 0), (2, 1, 0), ["(0, 0)", "(2, 1, 0)"]),
        ((0, 0), (-1, 0), ["-1"]),
        ((0, 0), (1.5, 0), ["1.5"]),
        ((), (), ["one block"]),
    ],
)
def test_an_impossible_specification_is_refused_with_its_values(p: tuple, m: tuple, names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"m") as caught:
        Staleness(p, m)
    assert all(name in str(caught.value) for name in names), caught.value


@pytest.mark.parametrize("text", ["DSP(1,1,0)", "DSP(1,,0; 2,1,0)", "(1,0; 2,0)", "DSP(0; 0; kept)", ""])
def test_another_form_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"DSP\(1,1,0; 4,2,0\)"):
        Staleness.parse(text)


def test_arguments_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="has its own p"):
        Staleness.of(3, p=0, m=Staleness.dsp(3))
    with pytest.raises(ValueError, match="3 blocks, the model has 2"):
        Staleness.of(2, m=Staleness.dsp(3))
    with pytest.raises(ValueError, match="2 values, the model has 3 blocks"):
        Staleness.of(3, m=(1, 0))
    with pytest.raises(TypeError, match="whole number"):
        Staleness.of(3, p="auto")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="its q is 0"):
        Staleness.dsp(2, (0, 0), (1, 1))
