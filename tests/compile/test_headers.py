"""The copy of torch's header without its regular expression, against the expression itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch

from aotcache.compile.headers import HEADER, MATCH, without_regex

INCLUDE = Path(torch.__file__).parent / "include"

DEVICES = [
    *("cpu", "cuda", "cuda:0", "cuda:12", "xpu:3", "mps", "cpu:0", "cuda:00", "cuda:184467440737095516160"),
    *("", ":", ":0", "cuda:", "cuda:x", "cuda:0x", "cuda: 0", "cuda:-1", "cuda:+1", "cuda:0:0", "cuda::0"),
    *("CPU", "cpux", "xcpu", " cpu", "cpu ", "cud", "meta", "cuda\n", "cuda:0\n", "cuda:1.0", "cpu|cuda"),
]

PROGRAM = """
#include <iostream>
#include <regex>
template <typename M> void show(bool matched, const M& sm) {
  std::cout << "[" << (matched ? "true" : "false");
  for (int n = 0; matched && n < 4; n++)
    std::cout << ", " << (sm[n].matched ? "true" : "false") << ", \\"" << sm[n].str() << "\\"";
  std::cout << "]";
}
int main(int count, char** texts) {
  for (int i = 1; i < count; i++) {
    const std::string text = texts[i];
    std::smatch sm;
    const bool matched = std::regex_match(text, sm, std::regex("(cpu|cuda|xpu|mps)(:([0-9]+))?"));
    std::cout << "[";
    show(matched, sm);
    std::cout << ", ";
    const aotcache::DeviceMatch own(text);
    show(own.matched, own);
    std::cout << "]" << std::endl;
  }
}
"""


def test_devices_are_taken_apart_as_by_the_expression(tmp_path: Path) -> None:
    (tmp_path / "match.hpp").write_text(MATCH)
    (tmp_path / "main.cpp").write_text('#include "match.hpp"\n' + PROGRAM)
    subprocess.run(["g++", "-std=c++20", "-o", "main", "main.cpp"], cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "main", *DEVICES], check=True, capture_output=True, text=True).stdout
    lines = [json.loads(line) for line in printed.splitlines()]
    assert len(lines) == len(DEVICES)
    for device, (theirs, ours) in zip(DEVICES, lines, strict=True):
        assert ours == theirs, device
    assert [theirs[0] for theirs, _ in lines].count(True) == 9


def test_this_torchs_header_is_the_expected_one_and_keeps_its_lines(tmp_path: Path) -> None:
    place = without_regex(INCLUDE, tmp_path, called="torch/include")
    assert place is not None, "torch's header has changed: see aotcache/compile/headers.py"
    made = (place / HEADER).read_text()
    assert "regex" not in made.replace(MATCH, "")
    prelude, _, rest = made.partition(f'#line 1 "torch/include/{HEADER}"\n')
    assert prelude == MATCH
    assert rest.count("\n") == (INCLUDE / HEADER).read_text().count("\n")


def test_it_is_made_once_and_again_where_it_is_not_whole(tmp_path: Path) -> None:
    place = without_regex(INCLUDE, tmp_path, called="torch/include")
    assert place is not None
    header = place / HEADER
    whole, first = header.read_bytes(), header.stat().st_ino
    assert without_regex(INCLUDE, tmp_path, called="torch/include") == place
    assert header.stat().st_ino == first
    header.write_bytes(whole[:1000])
    assert without_regex(INCLUDE, tmp_path, called="torch/include") == place
    assert header.read_bytes() == whole
    assert [path.name for path in header.parent.iterdir()] == [header.name]


def test_any_other_header_is_left_as_it_is(tmp_path: Path) -> None:
    other = tmp_path / "include" / HEADER
    assert without_regex(tmp_path / "include", tmp_path, called="torch/include") is None
    other.parent.mkdir(parents=True)
    other.write_text((INCLUDE / HEADER).read_text().replace("cuda|xpu", "cuda|npu|xpu"))
    assert without_regex(tmp_path / "include", tmp_path, called="torch/include") is None
    # One that needs it elsewhere.
    whole = (INCLUDE / HEADER).read_text()
    other.write_text(
        whole + "inline bool other(std::string s) { return std::regex_match(s, std::regex(s)); }\n"
    )
    assert without_regex(tmp_path / "include", tmp_path, called="torch/include") is None
    # Where none can be made.
    (tmp_path / "file").write_text("")
    assert without_regex(INCLUDE, tmp_path / "file", called="torch/include") is None
    odd = tmp_path / "a folder"
    assert without_regex(INCLUDE, odd, called="torch/include") is None
    assert not odd.exists()
