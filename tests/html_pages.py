"""Parses HTML pages into elements, texts and table cells."""

import re
from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """What a page holds; refuses elements that are not closed, ids that come twice and references to nothing."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.references, self.tags = [], [], [], []
        self.text, self.cells, self.headers = "", [], []
        self.feed(text)
        self.close()
        assert not self.open
        assert len(self.ids) == len(set(self.ids))
        assert set(self.references) <= set(self.ids)

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag == "tr":
            self.cells.append([])
        self.ids += [attrs["id"]] if "id" in attrs else []
        for key in ("aria-labelledby", "aria-describedby"):
            self.references += attrs.get(key, "").split()
        if "href" in attrs:
            assert attrs["href"].startswith("#")
            self.references.append(attrs["href"][1:])
        for value in attrs.values():
            self.references += re.findall(r"url\(#([^)]*)\)", value or "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("th", "td"):
            self.cells[-1].append(data)

    def named(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]
