"""The report and the audit as pages: one HTML file each, complete in itself. Data in, text out."""

from headwater.pipeline.page.audit import render_audit
from headwater.pipeline.page.facts import Report
from headwater.pipeline.page.report import render_report

__all__ = ["Report", "render_audit", "render_report"]
