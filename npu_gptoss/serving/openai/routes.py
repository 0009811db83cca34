"""Routes of OpenAI's that vLLM lacks: one model by its name (`models.retrieve`), input and end of a stored response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Query, Request

from npu_gptoss.serving.openai.errors import refused
from npu_gptoss.serving.openai.intake import as_json
from npu_gptoss.serving.openai.responses import input_items, not_found

if TYPE_CHECKING:
    from fastapi import FastAPI


def add_routes(app: FastAPI) -> None:
    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str, raw_request: Request) -> Any:
        served = await raw_request.app.state.openai_serving_models.show_available_models()
        found = next((card for card in served.data if card.id == name), None)
        if found is None:
            return as_json(refused(f"The model `{name}` does not exist.", "model", 404, "NotFoundError"))
        return as_json(found.model_dump())

    @app.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        response_id: str,
        raw_request: Request,
        order: Literal["asc", "desc"] = "desc",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
    ) -> Any:
        return as_json(input_items(raw_request.app.state.openai_serving_responses, response_id, order, limit, after))

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, raw_request: Request) -> Any:
        serving = raw_request.app.state.openai_serving_responses
        async with serving.response_store_lock:
            if serving.response_store.pop(response_id, None) is None:
                return as_json(not_found(serving, response_id))
            serving.msg_store.pop(response_id, None)
            serving.event_store.pop(response_id, None)
        if (task := serving.background_tasks.get(response_id)) is not None:
            task.cancel()
        return as_json({"id": response_id, "object": "response", "deleted": True})
