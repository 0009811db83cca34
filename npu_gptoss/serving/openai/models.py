"""`/v1/models/NAME`, by which clients check one model (`models.retrieve`); vLLM only lists all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import Request

from npu_gptoss.serving.openai.errors import refused

if TYPE_CHECKING:
    from fastapi import FastAPI


def add_route(app: FastAPI) -> None:
    @app.get("/v1/models/{name:path}")
    async def retrieve(name: str, raw_request: Request) -> Any:
        from fastapi.responses import JSONResponse

        served = await raw_request.app.state.openai_serving_models.show_available_models()
        found = next((card for card in served.data if card.id == name), None)
        if found is not None:
            return JSONResponse(found.model_dump())
        unknown = refused(f"The model `{name}` does not exist.", "model", 404, "NotFoundError")
        return JSONResponse(unknown.model_dump(), status_code=404)
