"""What stands in the audit log about one request: metadata, and what was asked and answered only where that was kept."""

from datetime import UTC, datetime

from router.audit import AuditContent, AuditRecord
from router.openai.visit import Visit


def audit_record(
    visit: Visit | None, name: str, where: str, status: int, now_s: float
) -> AuditRecord:
    """The record of a request that has been answered.

    Args:
        visit: What is known of it; None if nobody was recognised.
        name: The request id that its reply carried.
        where: Method and declared path.
        status: Of the reply.
        now_s: On the router's clock.
    """
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    if visit is None:
        return AuditRecord(time=time, request_id=name, where=where, status=status)
    timings = [run.timing for run in visit.runs if run.timing is not None]
    return AuditRecord(
        time=time,
        request_id=name,
        where=where,
        status=status,
        tenant=visit.tenant.tenant_id,
        key=visit.caller.key_id,
        model=visit.model,
        job=visit.runs[0].job.request_id if visit.runs else "",
        error="" if visit.error is None else visit.error.code,
        prompt_tokens=visit.prompt_tokens,
        cached_tokens=sum(timing.reused_tokens for timing in timings),
        output_tokens=visit.output_tokens,
        duration_s=round(now_s - visit.arrived_s, 6),
        first_token_s=round(timings[0].first_token_s, 6) if timings else None,
        content=_content(visit),
    )


def _content(visit: Visit) -> AuditContent | None:
    if not visit.asked and not visit.answered:
        return None
    answered = tuple(visit.answered[index] for index in sorted(visit.answered))
    return AuditContent(asked=visit.asked, answered=answered)
