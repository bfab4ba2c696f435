"""Handlers and a schedule for `headwater worker`. In this directory:

headwater worker tasks:make_log --processes 4 --threads 2
headwater publish jobs.db images.resize '{"image": 17}'
"""

import os

import headwater


def make_log() -> headwater.Log:
    """Called in each process: importing this module opens nothing."""
    log = headwater.open(os.environ.get("JOBS_LOG", "jobs.db"))

    # Shared: a message goes to one of all processes. It is acked when the function returns.
    @log.on("images.resize", id="resizers", mode="shared", max_attempts=3)
    def resize(message: headwater.ReceivedMessage) -> None:
        print("resized", message.data["image"], flush=True)

    # One process publishes each occurrence, and one of them handles it.
    @log.cron("0 3 * * *", id="nightly-report", topic="reports.nightly", tz="Europe/Berlin")
    def order_report(occurrence: headwater.Occurrence) -> dict[str, str]:
        return {"day": occurrence.at.date().isoformat()}

    @log.on("reports.nightly", id="reporter", mode="shared")
    def report(message: headwater.ReceivedMessage) -> None:
        print("report of", message.data["day"], flush=True)

    return log
