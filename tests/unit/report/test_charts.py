"""Charts are well-formed SVG whose points lie inside the frame."""

import re
from xml.etree import ElementTree as ET

from offload.report.charts import MARK, Chart, Line, render_page

SVG = "{http://www.w3.org/2000/svg}"


def chart(**changes):
    values = {
        "title": "read <of> a & b",
        "x_label": "block size",
        "y_label": "GB/s",
        "x_names": ("128 KiB", "1 MiB"),
        "lines": [Line(name="depth 1", points=[(0, 1.5), (1, 2.25)])],
    }
    return Chart(**(values | changes))


def test_a_page_is_well_formed_and_marked():
    text = render_page("title", "caption & more", [chart(), chart()])

    root = ET.fromstring(text)

    assert MARK in text
    assert len(root.findall(f"{SVG}g")) == 2
    assert "read <of> a & b" in [element.text for element in root.iter(f"{SVG}text")]


def test_points_lie_between_the_axes_and_higher_values_higher():
    text = render_page("t", "c", [chart()])

    (first, second) = _points(text)

    assert first[0] < second[0]
    assert first[1] > second[1]  # y grows downwards
    for x, y in (first, second):
        assert 64 <= x <= 460 - 96
        assert 34 <= y <= 300 - 46


def test_charts_without_points_or_with_zeros_can_be_drawn():
    for lines in ([], [Line(name="x", points=[])], [Line(name="x", points=[(0.0, 0.0)])]):
        ET.fromstring(render_page("t", "c", [chart(lines=lines, x_names=())]))


def _points(text):
    (found,) = re.findall(r'<polyline points="([^"]*)"', text)
    return [tuple(map(float, point.split(","))) for point in found.split()]
