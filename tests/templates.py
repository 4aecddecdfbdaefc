"""Chat templates that treat contents as those of well-known models do, written anew and short."""

TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

QWEN3 = """
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' and not (m.content.startswith('<tool_response>')
    and m.content.endswith('</tool_response>')) %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set text = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' %}
{%- set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in text %}
{%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.user and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') }}
{%- else %}{{ text }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if (loop.first and text) or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
{{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

QWEN25 = """
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{{- '<|im_start|>assistant' }}{{ '\\n' + m.content if m.content else '' }}
{%- for call in m.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA31 = """
{{- '<s>' }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|h|>system<|/h|>\\n\\nCutting Knowledge Date: December 2023\\n\\n' + system + '<|endoftext|>' }}
{%- for m in messages %}
{%- if m.tool_calls %}
{{- '<|h|>assistant<|/h|>\\n\\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}<|endoftext|>' }}
{%- elif m.role == 'tool' %}
{{- '<|h|>ipython<|/h|>\\n\\n' }}
{{- m.content | tojson if m.content is mapping or m.content is iterable else m.content }}{{ '<|endoftext|>' }}
{%- else %}{{ '<|h|>' + m.role + '<|/h|>\\n\\n' + (m.content | trim) + '<|endoftext|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|h|>assistant<|/h|>\\n\\n' }}{% endif %}"""

R1 = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|im_end|>' }}
{%- else %}{{ '<|User|>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""
"""Begins the thinking in the prompt, so that an answer has only its end."""

HARMONY = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if '<|channel|>' in m.content %}{{ raise_exception('thinking is a field of its own') }}{% endif %}
{%- if m.thinking and loop.last %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
