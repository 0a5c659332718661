"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function template() {
    const axis = { gridcolor: color("line"), linecolor: color("line"), zerolinecolor: color("line"), tickcolor: color("line") };
    return { layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("text"), size: 12, family: getComputedStyle(document.body).fontFamily },
      xaxis: axis, yaxis: axis,
      hoverlabel: { bgcolor: color("panel"), bordercolor: color("line"), font: { color: color("text") } },
      modebar: { color: color("soft"), activecolor: color("accent"), bgcolor: "rgba(0,0,0,0)" },
    } };
  }

  function draw(chart) {
    const { data, layout } = structuredClone(figures[chart.dataset.figure]);
    layout.template = template();
    const zooms = layout.dragmode === "zoom";
    return Plotly.react(chart, data, layout, { responsive: true, displaylogo: false, displayModeBar: zooms ? "hover" : false,
      modeBarButtonsToRemove: ["lasso2d", "select2d"] });
  }

  const charts = [...document.querySelectorAll(".chart")];
  const seen = new Set();
  function show() {  // what stands in a closed fold has no size yet
    for (const chart of charts) {
      if (!seen.has(chart) && chart.offsetParent !== null) {
        seen.add(chart);
        draw(chart);
      }
    }
  }
  document.addEventListener("toggle", show, true);
  dark.addEventListener("change", () => seen.forEach(draw));
  show();
})();
