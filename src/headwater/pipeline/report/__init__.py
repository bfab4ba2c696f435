"""The report and the audit as pages: one HTML file each, complete in itself. Data in, text out.

It imports Altair, which takes a second: import it when a page is to be made.
"""

from headwater.pipeline.report.model import Report
from headwater.pipeline.report.pages import render_audit, render_report

__all__ = ["Report", "render_audit", "render_report"]
