"use strict";
(() => {
  const data = JSON.parse(document.getElementById("lms-data").textContent);
  const UNITS = 1000;
  const size = (n) => {
    for (const [unit, b] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
      if (n >= b) return (n / b).toFixed(1) + " " + unit;
    return Math.round(n) + " bytes";
  };
  const time = (s) =>
    s >= 1 ? s.toFixed(2) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(2) + " ms" : Math.round(s * 1e6) + " µs";
  const element = (name, text) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  document.documentElement.classList.add("scripted");
  for (const tools of document.querySelectorAll(".js[hidden]")) tools.hidden = false;

  for (const chart of document.querySelectorAll("[data-step]")) {
    const step = data.reports[Number(chart.dataset.step)].step;
    const whole = Math.max(step.before.seconds, step.after.seconds, 1e-9);
    const svg = chart.querySelector("svg");
    const parts = [...svg.querySelectorAll(".lm-zoom")];
    const ticks = [...svg.querySelectorAll(".lm-tick")];
    const said = chart.closest("section").querySelector(".said");
    const tip = element("div");
    tip.className = "tip";
    tip.hidden = true;
    const line = element("div");
    line.className = "cursor";
    line.hidden = true;
    chart.append(line, tip);
    let from = 0, width = UNITS, at = whole / 2;

    const show = () => {
      for (const part of parts) {
        const height = part.getAttribute("height");
        part.setAttribute("viewBox", `${from} 0 ${width} ${height}`);
      }
      for (const tick of ticks)
        tick.textContent = time(((from + Number(tick.dataset.share) * width) / UNITS) * whole);
    };
    const zoom = (factor, middle) => {
      const next = Math.min(UNITS, Math.max(2, width * factor));
      from = Math.min(Math.max(0, middle - ((middle - from) * next) / width), UNITS - next);
      width = next;
      show();
    };
    const live = (side, when) =>
      side.stays
        .filter(([, begin, end]) => begin <= when && when < end)
        .map(([tensor]) => step.tensors[tensor])
        .sort((a, b) => b[3] - a[3]);
    const rest = (side, when) => {
      let level = 0;
      for (const [t, n] of side.rest) if (t <= when) level = n;
      return level;
    };
    const tell = (when, isAfter) => {
      const side = isAfter ? step.after : step.before;
      const found = live(side, when);
      const total = step.base_bytes + rest(side, when) + found.reduce((sum, row) => sum + row[3], 0);
      tip.replaceChildren(
        element("strong", `${time(when)}, ${isAfter ? "as planned" : "before"}: ${size(total)}`));
      const list = element("ul");
      for (const row of found.slice(0, 8))
        list.append(element("li", `${size(row[3])} ${row[0]} (${row[4]})`));
      if (found.length > 8) list.append(element("li", `and ${found.length - 8} more`));
      tip.append(list);
      return tip.textContent;
    };
    const place = (when) => {
      const box = parts[0].getBoundingClientRect(), own = chart.getBoundingClientRect();
      const share = ((when / whole) * UNITS - from) / width;
      line.hidden = tip.hidden = share < 0 || share > 1;
      const x = box.left - own.left + share * box.width;
      line.style.cssText = `left:${x}px;top:0;height:${own.height}px`;
      tip.style.left = (share > 0.5 ? Math.max(0, x - tip.offsetWidth - 12) : x + 12) + "px";
      tip.style.top = "24px";
    };
    const timeOf = (event) => {
      const box = parts[0].getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      return ((from + share * width) / UNITS) * whole;
    };
    chart.addEventListener("pointermove", (event) => {
      at = timeOf(event);
      const second = parts[1].getBoundingClientRect();
      tell(at, event.clientY > second.top - 20);
      place(at);
    });
    chart.addEventListener("pointerleave", () => { line.hidden = tip.hidden = true; });
    chart.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 || event.deltaX > 0 ? 1.25 : 0.8, (timeOf(event) / whole) * UNITS);
    }, { passive: false });
    const keys = {
      ArrowLeft: () => { at = Math.max(0, at - ((width / UNITS) * whole) / 50); },
      ArrowRight: () => { at = Math.min(whole, at + ((width / UNITS) * whole) / 50); },
      "+": () => zoom(0.5, (at / whole) * UNITS),
      "-": () => zoom(2, (at / whole) * UNITS),
      0: () => { from = 0; width = UNITS; show(); },
      Home: () => { at = 0; },
      End: () => { at = whole; },
    };
    const press = (key) => {
      keys[key]();
      if ((at / whole) * UNITS < from || (at / whole) * UNITS > from + width) {
        from = Math.min(Math.max(0, (at / whole) * UNITS - width / 2), UNITS - width);
        show();
      }
      said.textContent = tell(at, true);
      place(at);
    };
    chart.addEventListener("keydown", (event) => {
      if (!(event.key in keys) || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      press(event.key);
    });
    for (const button of chart.closest("section").querySelectorAll("[data-press]"))
      button.addEventListener("click", () => press(button.dataset.press));
    for (const button of chart.closest("section").querySelectorAll("[data-hide]"))
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(shown));
        for (const group of svg.querySelectorAll(`[data-fate="${button.dataset.hide}"]`))
          group.style.display = shown ? "" : "none";
      });
  }

  const save = document.getElementById("save-json");
  if (save)
    save.addEventListener("click", () => {
      const link = element("a");
      link.href = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }));
      link.download = "lmsrun-report.json";
      link.click();
      URL.revokeObjectURL(link.href);
    });
})();
