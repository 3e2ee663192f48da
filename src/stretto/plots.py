"""What the HTML pages share: each is one self-contained file, drawn by plotly, that needs no network."""

import html
import importlib.resources
import importlib.util
from collections.abc import Mapping
from typing import Any


def check_installed() -> None:
    """Raise RuntimeError if what a page needs is missing."""
    for package in ("jinja2", "plotly"):
        if importlib.util.find_spec(package) is None:
            raise RuntimeError(f"the page needs {package}, which is missing: pip install 'stretto[report]'")


def render(package: str, template: str, figures: Mapping[str, Any], **values: Any) -> str:
    """A page from a template of a package: `figures` are there by name as HTML, `plotly` is the library's source.

    Raises RuntimeError if plotly or jinja2 is missing.
    """
    check_installed()
    import jinja2  # noqa: PLC0415  (optional dependencies)
    from plotly.offline import get_plotlyjs  # noqa: PLC0415

    config = {"displayModeBar": False, "responsive": True}
    parts = {
        name: figure.to_html(full_html=False, include_plotlyjs=False, config=config)
        for name, figure in figures.items()
    }
    source = (importlib.resources.files(package) / template).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source).render(figures=parts, plotly=get_plotlyjs(), **values)


def label(text: str) -> str:
    """Text for a plot, where plotly would otherwise obey some of HTML's tags."""
    return html.escape(text.encode("utf-8", "backslashreplace").decode(), quote=False)


def styled(figure: Any, height: int = 380) -> Any:
    """The figure in the look that all have, `height` pixels high."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 60, "r": 20, "t": 70, "b": 50},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    return figure
