"""Small JSON schemas for Hypothesis. They use every kind that can be enforced."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, object]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kind = draw(st.sampled_from(kinds + (["array", "object", "anyOf"] if depth else [])))
    inner = schemas(depth=depth - 1)
    match kind:
        case "string":
            return {"type": "string", "maxLength": draw(st.integers(1, 12))}
        case "integer":
            low = draw(st.integers(-1000, 1000))
            return {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(0, 5000))}
        case "enum":
            return {
                "enum": draw(
                    st.lists(
                        st.integers(-(2**53), 2**53) | st.text(max_size=5) | st.none(), min_size=1, max_size=4
                    )
                )
            }
        case "const":
            return {"const": draw(st.booleans() | st.text(max_size=8))}
        case "array":
            low = draw(st.integers(0, 2))
            return {"type": "array", "items": draw(inner), "minItems": low, "maxItems": low + 2}
        case "object":
            names = draw(st.lists(st.text("abcé_", min_size=1, max_size=4), unique=True, max_size=3))
            required = [name for name in names if draw(st.booleans())]
            properties = {name: draw(inner) for name in names}
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        case "anyOf":
            return {"anyOf": draw(st.lists(inner, min_size=1, max_size=3))}
        case _:
            return {"type": kind}
