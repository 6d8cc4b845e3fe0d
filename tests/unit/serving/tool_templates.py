"""Chat templates that treat tools as those of three model families do."""

from __future__ import annotations

HERMES = r"""
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- 'You may call functions.\n<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
{{- '\n</tools>\nCall one so:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}{{ '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA = r"""{{ bos_token }}
{%- set seen = namespace(tools=not tools) %}
{%- for m in messages %}
{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- if m.role == 'user' and not seen.tools %}{% set seen.tools = true %}
{{- 'Answer with JSON: {"name": function name, "parameters": dictionary}.\n\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}{% endif %}
{%- if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}' }}
{%- else %}{{ m.content | trim }}{% endif %}{{ '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

MISTRAL = r"""{{ bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set turn = namespace(index=0) %}
{%- for m in messages %}{% if m.role in ('user', 'assistant') and not m.tool_calls %}
{%- if (m.role == 'user') != (turn.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set turn.index = turn.index + 1 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}{{ ']<|im_end|>' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + '<|im_end|>' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{% endfor %}"""

TAGS = HERMES.replace('{"name": <name>, "arguments": <object>}', "<function=name>...</function>")
ARGS = MISTRAL.replace("[TOOL_CALLS] [", "[TOOL_CALLS]name[ARGS]")

PYTHONIC = r"""{{ bos_token }}
{%- for m in messages %}
{{- '<|header_start|>' + ('ipython' if m.role == 'tool' else m.role) + '<|header_end|>\n\n' }}
{%- if m.role == 'user' and loop.first and tools %}
{{- 'Answer with calls: [name1(key1=value1, key2=value2), name2()]\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{% endif %}
{%- if m.tool_calls %}{{ '<|python_start|>[' }}
{%- for call in m.tool_calls %}{{ call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}{{ key + '=' }}{{ value | tojson }}
{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}
{{- ']<|python_end|>' }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}"""
