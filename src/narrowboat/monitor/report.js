// One step is looked at in all charts at once: by pointer, or with the arrow keys.
"use strict";
(() => {
  const values = JSON.parse(document.getElementById("values").textContent);
  const steps = values.step;
  const count = (number, digits = 0) => number.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const bytes = (number) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (number >= 1000 && unit < units.length - 1) { number /= 1024; unit += 1; }
    return (unit ? number.toPrecision(3) : String(number)) + " " + units[unit];
  };
  const say = {
    loss: (v) => v.toFixed(4), pace: (v) => count(v, 1), peak: bytes, norm: (v) => v.toFixed(4), rate: (v) => v.toExponential(3), causes: (v) => v,
  };
  const heldOutAt = (step) => {
    const at = values.heldout_step.findLastIndex((measured) => measured <= step);
    return at < 0 || values.heldout[at] === null ? "" : ` · held out ${values.heldout[at].toFixed(4)}`;
  };
  const charts = [...document.querySelectorAll(".chart")].map((figure) => {
    const { key, low, high } = figure.dataset;
    const plot = figure.querySelector(".plot");
    const cross = Object.assign(document.createElement("i"), { className: "cross", hidden: true });
    const point = Object.assign(document.createElement("i"), { className: "point", hidden: true });
    plot.append(cross, point);
    return { key, plot, cross, point, output: figure.querySelector("output"), title: figure.querySelector("h3").textContent,
      svg: figure.querySelector("svg"), labels: figure.querySelector(".x"), marks: [...plot.querySelectorAll(".mark")], y: (value) => 100 * (value - low) / (high - low) };
  });
  const all = charts.length ? charts[0].plot.closest(".chart").dataset : { first: 0, last: 1 };
  const whole = { from: Number(all.first), to: Number(all.last) };
  let part = whole;
  let current = steps.length - 1;
  const x = (step) => 100 * (step - part.from) / (part.to - part.from);
  const stepAt = (plot, event) => {
    const box = plot.getBoundingClientRect();
    return part.from + (event.clientX - box.left) / box.width * (part.to - part.from);
  };
  for (const { marks } of charts) for (const mark of marks) mark.dataset.step = whole.from + parseFloat(mark.style.left) / 100 * (whole.to - whole.from);

  const see = (from, to) => {
    part = to - from >= 1 ? { from, to } : whole;
    const side = (step) => 1000 * (step - whole.from) / (whole.to - whole.from);
    for (const { svg, labels, marks } of charts) {
      svg.setAttribute("viewBox", `${side(part.from)} 0 ${side(part.to) - side(part.from)} 1000`);
      svg.classList.toggle("part", part !== whole);
      labels.dataset.whole ??= labels.innerHTML;
      if (part === whole) labels.innerHTML = labels.dataset.whole;
      else labels.replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((share) => {
        const label = document.createElement("span");
        label.style.left = `${100 * share}%`;
        label.textContent = count(Math.round(part.from + share * (part.to - part.from)));
        return label;
      }));
      for (const mark of marks) { mark.style.left = `${x(mark.dataset.step)}%`; mark.hidden = x(mark.dataset.step) < 0 || x(mark.dataset.step) > 100; }
    }
    hide();
  };

  const show = (index) => {
    current = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[current];
    for (const { key, plot, cross, point, output, title, y } of charts) {
      if (!(key in values)) continue;
      const value = values[key][current];
      const words = `step ${count(step)} · ${value === null ? "not a number" : say[key](value)}` + (key === "loss" ? heldOutAt(step) : "");
      output.textContent = words;
      cross.hidden = x(step) < 0 || x(step) > 100;
      cross.style.left = `${x(step)}%`;
      point.hidden = typeof value !== "number" || x(step) < 0 || x(step) > 100;
      point.style.left = `${x(step)}%`;
      point.style.bottom = `${y(value)}%`;
      plot.setAttribute("aria-valuenow", step);
      plot.setAttribute("aria-valuetext", `${title}, ${words}`);
    }
  };
  const hide = () => {
    for (const { cross, point, output } of charts) { cross.hidden = point.hidden = true; output.textContent = ""; }
  };
  const nearest = (step) => {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  };
  const moves = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };

  if (steps.length) for (const { plot, title } of charts) {
    plot.tabIndex = 0;
    plot.setAttribute("role", "slider");
    plot.setAttribute("aria-label", `${title}, step by step`);
    plot.setAttribute("aria-valuemin", steps[0]);
    plot.setAttribute("aria-valuemax", steps[steps.length - 1]);
    plot.setAttribute("aria-valuenow", steps[current]);
    const chosen = Object.assign(document.createElement("i"), { className: "chosen", hidden: true });
    plot.append(chosen);
    let began = null;
    const point = (event) => {
      const step = stepAt(plot, event);
      show(nearest(step));
      if (began === null) return;
      chosen.hidden = false;
      chosen.style.left = `${Math.max(0, x(Math.min(began, step)))}%`;
      chosen.style.width = `${Math.abs(x(step) - x(began))}%`;
    };
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", (event) => { began = event.pointerType === "mouse" ? stepAt(plot, event) : null; point(event); });
    addEventListener("pointerup", (event) => {
      if (began === null) return;
      const [from, to] = [began, stepAt(plot, event)].sort((one, two) => one - two);
      began = null;
      chosen.hidden = true;
      if (to - from >= 1) see(Math.max(whole.from, from), Math.min(whole.to, to));
    });
    plot.addEventListener("dblclick", () => see(0, 0));
    plot.addEventListener("pointerleave", () => { if (document.activeElement !== plot) hide(); });
    plot.addEventListener("focus", () => show(current));
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") see(0, 0);
      if (!(event.key in moves)) return;
      event.preventDefault();
      show(current + moves[event.key]);
    });
  }

  const table = document.getElementById("values-table");
  if (table) table.addEventListener("toggle", () => {
    const place = table.querySelector("div");
    if (!table.open || place.firstChild) return;
    const columns = { step: "step", loss: "loss", smoothed: "smoothed loss", pace: "tokens a second", peak: "peak bytes", budget: "budget bytes", rate: "learning rate", norm: "gradient norm", elapsed: "seconds" };
    const row = (cell, words) => `<tr>${words.map((word) => `<${cell}>${word}</${cell}>`).join("")}</tr>`;
    const lines = steps.map((_, at) => row("td", Object.keys(columns).map((key) => values[key][at] ?? "not a number")));
    place.innerHTML = `<table><thead>${row("th", Object.values(columns))}</thead><tbody>${lines.join("")}</tbody></table>`;
  });
})();
