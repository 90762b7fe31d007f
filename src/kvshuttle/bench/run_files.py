"""Names of the files in a run's directory."""

from __future__ import annotations

PLAN_FILE = "plan.json"
RECORDS_FILE = "records.jsonl"
FACTS_FILE = "facts.json"
REPORT_FILE = "report.md"
CELLS_FILE = "cells.jsonl"
PAGE_FILE = "report.html"
TOKENIZER_DIR = "tokenizer"
