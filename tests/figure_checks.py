"""What every figure is held to: letters that are large enough, and none cut off."""

from __future__ import annotations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def letters(fig: Figure) -> list[Text]:
    """Return the texts that a drawn figure shows."""
    # Ticks outside of an axis' limits have labels that are never drawn.
    ticks = {
        label
        for ax in fig.axes
        for axis in (ax.xaxis, ax.yaxis)
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        for label in (tick.label1, tick.label2)
    }
    shown = set(fig.findobj(Text)) - ticks
    return [text for text in shown if text.get_visible() and text.get_text().strip()]


def cut_off(fig: Figure) -> list[str]:
    """Draw a figure and return the texts that do not lie inside it."""
    FigureCanvasAgg(fig).draw()
    width, height = fig.get_size_inches() * fig.dpi
    cut = []
    for text in letters(fig):
        box = text.get_window_extent(fig.canvas.get_renderer())
        if not (box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height):
            cut.append(text.get_text())
    return cut
