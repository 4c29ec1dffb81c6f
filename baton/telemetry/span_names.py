"""Names of spans and of their attributes. OpenTelemetry's names for generative AI still move:
they stand here and nowhere else.
"""

ADMISSION = "baton.admission"
ROUTE = "baton.route"
PREFILL_QUEUE = "baton.prefill_queue"
PREFILL = "baton.prefill"
TRANSFER = "baton.transfer"
DECODE_QUEUE = "baton.decode_queue"
DECODE = "baton.decode"

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"

CACHED_TOKENS = "baton.cached_tokens"
TRANSFER_BYTES = "baton.transfer.bytes"
TRANSFER_UNHIDDEN_S = "baton.transfer.unhidden_s"
RETRIES = "baton.retries"
RESUMPTIONS = "baton.resumptions"
WORKER = "baton.worker"


def operation_of(path: str) -> str:
    """What an endpoint does, in those names."""
    return "text_completion" if path == "/v1/completions" else "chat"
