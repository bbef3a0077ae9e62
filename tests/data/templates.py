"""Chat templates written for the tests: each does one thing that a well-known model's template does."""

from __future__ import annotations

import copy

from transformers import PreTrainedTokenizerBase

# Plain turns; a line break behind the end of a turn.
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Prints BOS itself, trims every text, tools in the system turn, calls of tools as JSON.
LLAMA3 = """{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>

Tools: {{ tools | tojson }}<|eot_id|>{% endif %}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{% if m.tool_calls %}{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""  # noqa: E501

# Takes the thoughts out of all turns before the last question, and adds empty ones to the last answer.
QWEN3 = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools %}<|im_start|>system
# Tools
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role in ('user', 'system') -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'tool' -%}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else -%}
{%- set thought = '' -%}{%- set said = m.content -%}
{%- if '</think>' in said -%}
{%- set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought.strip('\\n') }}
</think>

{{ said.lstrip('\\n') }}{% else %}{{ said }}{% endif %}
{%- for c in m.tool_calls or [] %}{% if said or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif -%}{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""

# No system turn, strict alternation, the assistant is called model.
GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""  # noqa: E501

# EOS only behind the last answer; no words before an answer; the system prompt moves into the last question.
MISTRAL = """{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}
{{- bos_token -}}
{%- for m in turns -%}
{%- if m.role == 'user' -%}[INST] {{ system + '\\n\\n' + m.content if system and (loop.last or loop.index0 == turns | length - 2) else m.content }}[/INST]
{%- else -%}{{ ' ' + m.content }}{%- if loop.last -%}{{ eos_token }}{%- endif -%}
{%- endif -%}
{%- endfor -%}"""  # noqa: E501

# A blank between an answer and its EOS.
LLAMA2 = """{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}{% elif m.role == 'system' %}{{ '<<SYS>>' + m.content + '<</SYS>>' }}{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""  # noqa: E501

# What tools say is shown as JSON; the generation prompt already opens a thought.
JSONTOOL = """{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>tool
{{ {'content': m.content} | tojson }}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1].lstrip('\\n') if not loop.last else m.content }}{% if m.tool_calls %}<call>{{ m.tool_calls | tojson }}{% endif %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""  # noqa: E501

SPECIAL = [
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "</s>",
    "<s>",
]

STYLES = {
    "chatml": (CHATML, "<|im_start|>", "<|im_end|>"),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "qwen3": (QWEN3, "<|im_start|>", "<|im_end|>"),
    "gemma": (GEMMA, "<s>", "</s>"),  # its turns end with another token than its EOS
    "mistral": (MISTRAL, "<s>", "</s>"),
    "llama2": (LLAMA2, "<s>", "</s>"),
    "jsontool": (JSONTOOL, "<|im_start|>", "<|im_end|>"),
}


def with_template(tokenizer: PreTrainedTokenizerBase, style: str) -> PreTrainedTokenizerBase:
    template, bos, eos = STYLES[style]
    styled = copy.deepcopy(tokenizer)
    styled.add_tokens(SPECIAL, special_tokens=True)
    styled.bos_token, styled.eos_token, styled.pad_token = bos, eos, eos
    styled.chat_template = template
    styled.style = style
    return styled
